"""What is expected, in seconds: the cost models as the scheduler's questions.

Holds the compute model, one model a channel, what the compute thread is at, and how much work of
more urgent requests each resource has before it. Decides nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final

from cacheflow.costs import ChannelModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cacheflow.costs import ComputeModel
    from cacheflow.scheduling.glance import Glance
    from cacheflow.types import Load, Tile

__all__ = ["Outlook", "Work"]

_DEPTH_SECONDS: Final = 0.005
"""Loads in flight should cover this much of a channel's time, so that it never runs dry: what is in
flight cannot be taken back, keeps others waiting and may be overtaken."""
_UNSETTLED_SECONDS: Final = 0.02
"""The same while few loads (``_SETTLED``) came about when they were expected: the channel may be
several times faster than it is believed to be."""
_SETTLED: Final = 3
_DEPTH_SHARE: Final = 0.6
"""... but no more than this of what a request has left."""
_UNIT_SHARE: Final = 0.125
"""One load carries at most this share of what is left, where ``least_seconds`` would be more."""
_GUESS_SHARE: Final = 0.5
"""The same behind the very first load: only a larger one tells latency from bandwidth."""
_FRESH_SECONDS: Final = 60.0
"""What was observed longer ago is worth no more than a profile from a file: a first observation
that is faster outweighs it. A slower one does not: after a pause the first often is, and of a link
it may be latency or bandwidth."""
_FASTER: Final = 0.67
"""Of what was expected: below this an observation contradicts it."""
_SLOWER: Final = 1.1
"""Above this the first load after a while does not confirm what was known."""
_RETRY_SECONDS: Final = 1.0
_RETRY_TIMES: Final = 4.0
"""A channel that is believed too slow for anybody is asked all the same when it was last asked so
long ago, and so many times what the answer is believed to take: nothing else would ever show that
it is not slow any more. If it is, a fifth of it is used in vain."""
_LAUNCH_MEMORY: Final = 0.1
"""How much of what is believed of passes one of them changes."""
_INFINITE: Final = float("inf")


@dataclass(slots=True)
class Work:
    """An amount of compute: tile-layers, and their work in the compute model's two terms.

    Linear in all three, so that what is left of a request can be kept up to date by differences
    while the rates behind them are learned.
    """

    count: int = 0
    linear: float = 0.0
    attention: float = 0.0

    def add(self, count: int, work: tuple[float, float]) -> None:
        """``count`` more layers of a tile with ``work`` a layer (fewer if negative)."""
        self.count += count
        if self.count:
            self.linear += count * work[0]
            self.attention += count * work[1]
        else:
            self.linear = self.attention = 0.0

    def add_each(self, count: int, works: Sequence[tuple[float, float]]) -> None:
        """``count`` (> 0) more layers of each of some tiles."""
        self.count += count * len(works)
        for linear, attention in works:
            self.linear += count * linear
            self.attention += count * attention

    def add_all(self, other: Work, sign: int) -> None:
        """Plus (or minus) all of ``other``."""
        self.count += sign * other.count
        if self.count:
            self.linear += sign * other.linear
            self.attention += sign * other.attention
        else:
            self.linear = self.attention = 0.0


class Outlook:
    """Predictions shared by all requests of one scheduler.

    ``claim_ahead``: how many layers the engine claims ahead of its device (0 on a CPU); the first
    intervals between claims measure nothing then.
    """

    def __init__(self, compute: ComputeModel, *, max_load_bytes: int, claim_ahead: int = 0) -> None:
        self.gate = threading.Lock()
        """Held by whoever asks or tells anything here while the compute thread may do so too."""
        self.compute = compute
        self.channels: dict[str, ChannelModel] = {}
        self.bytes_ahead: dict[str, int] = {}
        """Left to be asked of each channel by requests that compute has turned away from."""
        self.work_ahead: dict[str, Work] = {}
        """Left to be computed of requests that each channel has turned away from."""
        self.requests = 0
        """How many there are."""
        self.all_bytes: dict[str, int] = {}
        """Left to be asked of each channel by all requests."""
        self.all_work = Work()
        """Left to be computed, if nothing more were loaded, of all requests."""
        self.all_suffixes = Work()
        """What of it no load can save."""
        self.max_load_bytes = max_load_bytes
        self._claim_ahead = claim_ahead
        self._current: tuple[Tile, ...] = ()
        """What the compute thread pushes through a layer, in one pass."""
        self._launches = 1.0
        """Launches a tile-layer: fewer than one where passes hold several tiles."""
        self._claimed_at = 0.0
        self._ended = True
        self._observed_at = -_INFINITE
        self.was_surprised = False
        """Compute was faster than believed when old knowledge was tried last."""
        self._asked_at: dict[str, float] = {}
        self._delivered_at: dict[str, float] = {}
        self._deliveries: dict[str, int] = {}
        """Loads that each channel has delivered since it was silent for long, or much faster than
        believed."""
        self._tried: dict[str, int] = {}
        """Bytes of the one load that a channel has delivered since it was silent for long, if that
        came later than expected."""
        self._late: dict[str, float] = {}
        self.agreeing: set[str] = set()
        """Channels whose latest load came about when it was expected."""
        self._streak = 0

    def channel(self, name: str) -> ChannelModel:
        """The model of channel ``name``, made on first use."""
        model = self.channels.get(name)
        if model is None:
            model = self.channels[name] = ChannelModel()
            self.bytes_ahead[name] = self.all_bytes[name] = 0
            self.work_ahead[name] = Work()
        return model

    def speeds(self) -> tuple[float, ...]:
        """How fast everything is that anything is known of; longer once more is known."""
        rates = self.compute.rates
        known = [] if rates is None else [max(rates[1], 1e-300)]
        return (*known, *(m.bandwidth for m in self.channels.values() if m.bandwidth))

    # -- compute -------------------------------------------------------------------------------

    def layer_seconds(self, work: tuple[float, float]) -> float | None:
        """One layer of a tile with ``work``."""
        rates = self.compute.rates
        if rates is None:
            return None
        return rates[0] * self._launches + rates[1] * work[0] + rates[2] * work[1]

    def layer_bound(self, work: tuple[float, float]) -> float | None:
        """Seconds within which a layer is done nearly always: late compute cannot be taken back."""
        seconds = self.layer_seconds(work)
        return None if seconds is None else seconds * (1 + 2 * self.compute.lateness)

    def seconds(self, work: Work) -> float | None:
        """All of ``work``, one after the other."""
        rates = self.compute.rates
        if rates is None:
            return None
        return (
            rates[0] * self._launches * work.count
            + rates[1] * work.linear
            + rates[2] * work.attention
        )

    def layer_ended(self, now: float) -> None:
        """The compute thread is out of the layer that it claimed last: learn from it."""
        if self._ended or not self._current:
            return
        self._ended = True
        if self._streak > self._claim_ahead:
            self._learn(self._current, now - self._claimed_at, now)
        self._streak += 1

    def _learn(self, tiles: Sequence[Tile], seconds: float, now: float) -> None:
        """One pass of a layer took ``seconds``: old knowledge is doubted if it was faster."""
        expected = self.compute.pass_seconds(tiles) or 0.0
        if self.compute_stale(now):
            self.was_surprised = seconds < _FASTER * expected
            if self.was_surprised:
                self.compute.doubt()
        self.compute.observe_pass(tiles, seconds)
        self._launches += _LAUNCH_MEMORY * (1 / len(tiles) - self._launches)
        self._observed_at = now

    def claimed(self, tile: Tile | None, now: float, *, joins: bool = False) -> None:
        """The compute thread begins a layer of ``tile`` (None: it stops); ``joins``: in the pass
        that it was just asked about for other tiles."""
        if joins:
            if tile is not None:
                self._current = (*self._current, tile)
                self._ended = False
            return
        self.layer_ended(now)
        if tile is None or (tile,) != self._current[:1]:
            self._streak = 1
        self._current = () if tile is None else (tile,)
        self._claimed_at = now
        self._ended = False

    def compute_stale(self, now: float) -> bool:
        """Whether what is known of compute comes from another process, or from a while ago."""
        return now - self._observed_at > _FRESH_SECONDS

    def current_left(self, now: float) -> float:
        """Seconds until the layer being computed is done."""
        if not self._current or self._ended:
            return 0.0
        cost = self.compute.pass_seconds(self._current) or 0.0
        return max(0.0, self._claimed_at + cost - now)

    # -- loads ---------------------------------------------------------------------------------

    def started(self, load: Load, now: float) -> None:
        """A load was handed out."""
        self._asked_at[load.channel] = now
        self.channel(load.channel).started(load.id, load.nbytes, now)

    def ended(self, load: Load, now: float, *, delivered: bool) -> None:
        """A load ended; its channel's model learns from it."""
        model = self.channel(load.channel)
        if delivered:
            self._late[load.channel] = ratio = model.over_expected(load.id, now)
            if model.bandwidth and 1 / _SLOWER < ratio < _SLOWER:
                self.agreeing.add(load.channel)
            else:
                self.agreeing.discard(load.channel)
            old = now - self._delivered_at.get(load.channel, -_INFINITE) > _FRESH_SECONDS
            on_trial = old or self._tried.pop(load.channel, None) is not None
            if old and ratio > _SLOWER:  # By latency or by bandwidth: a larger one will tell.
                self._tried[load.channel] = load.nbytes
            if on_trial and ratio < _FASTER:
                model.doubt()
            surprise = old or ratio < _FASTER
            self._deliveries[load.channel] = 1 if surprise else self._deliveries[load.channel] + 1
            self._delivered_at[load.channel] = now
        model.ended(load.id, now, delivered=delivered)

    def lateness(self, channels: Iterable[str]) -> float:
        """How many times longer than expected the latest load of any took; at least 1."""
        return max([1.0, *(self._late.get(name, 1.0) for name in channels)])

    def load_seconds(self, channel: str, nbytes: int, now: float) -> float | None:
        """Seconds until ``nbytes`` more, asked for now, would be there."""
        model = self.channels[channel]
        return model.left(model.in_flight_bytes + nbytes, now)

    def transfer_seconds(self, channel: str, nbytes: int) -> float:
        """The same by bandwidth alone, as if nothing were late (0 where nothing is known)."""
        model = self.channels[channel]
        bandwidth = model.bandwidth
        return (model.in_flight_bytes + nbytes) / bandwidth if bandwidth else 0.0

    def shared_seconds(self, channels: Mapping[str, int], nbytes: int) -> float | None:
        """``nbytes`` that several channels have, each giving what it can; None while unknown."""
        total, queued = 0.0, nbytes
        for name in channels:
            model = self.channels[name]
            total += model.bandwidth or 0.0
            queued += model.in_flight_bytes
        return queued / total if total else None

    def all_loads(self, now: float) -> float | None:
        """Seconds until all that any request could load would be there; None while unknown."""
        longest = 0.0
        for name, nbytes in self.all_bytes.items():
            model = self.channels[name]
            if nbytes or model.in_flight:
                seconds = model.left(model.in_flight_bytes + nbytes, now)
                if seconds is None:
                    return None
                longest = max(longest, seconds)
        return longest

    def has_room(self, channel: str, request: Glance | None) -> bool:
        """Whether another load of ``request`` (of any that will be loading for long) would keep
        the channel busy rather than queue behind it."""
        model = self.channels[channel]
        bandwidth, flying = model.bandwidth, model.in_flight
        if bandwidth is None:
            return flying == 0
        if flying < 2:
            return True
        known = self._deliveries.get(channel, 0) >= _SETTLED
        seconds = _DEPTH_SECONDS if known else _UNSETTLED_SECONDS
        if request is not None and request.left is not None:
            seconds = min(seconds, request.left * _DEPTH_SHARE)
        return model.in_flight_bytes < bandwidth * (seconds + model.latency)

    def is_probing(self, channel: str, nbytes: int) -> bool:
        """Whether ``nbytes`` more would tell latency from bandwidth, as one load of a new link or a
        slow first one of a known one, does not; compute may overtake them."""
        model = self.channels[channel]
        first = model.typical_bytes if model.is_guess else self._tried.get(channel, _INFINITE)
        return not model.in_flight and nbytes > first

    def is_due(self, channel: str, nbytes: int, now: float) -> bool:
        """Whether to ask ``channel`` for ``nbytes`` although it is believed to be too slow."""
        model = self.channels[channel]
        if model.in_flight or not model.bandwidth:
            return False
        silent = now - self._asked_at.get(channel, -_INFINITE)
        return silent > max(_RETRY_SECONDS, _RETRY_TIMES * nbytes / model.bandwidth)

    def is_on_trial(self, channel: str) -> bool:
        """Whether one load has come later than what was known of the channel a while ago said: the
        next one tells why."""
        return channel in self._tried

    def unit_layers(
        self, channel: str, stride: int, free: int, parts: int, least_seconds: float
    ) -> int:
        """Layers of ``stride`` bytes in one load: about 1/``parts`` of what the channel has left.

        One while its bandwidth is unknown: a probe should cost little.
        """
        model = self.channels[channel]
        bandwidth = model.bandwidth
        if not bandwidth:
            return 1
        left = model.in_flight_bytes + free
        on_trial = model.is_guess or channel in self._tried
        share = _GUESS_SHARE if on_trial else _UNIT_SHARE
        nbytes = max(left / parts, min(bandwidth * least_seconds, left * share))
        nbytes = min(nbytes, self.max_load_bytes)
        return max(1, int(nbytes / stride))

    # -- both ----------------------------------------------------------------------------------

    def meeting(self, work: Work, load: float | None, head_start: float = 0.0) -> float | None:
        """Seconds until both ends together would have done ``work``, all loadable in ``load``.

        Fluid: with a share ``x`` computed from the front, ``linear * x + attention * x**2 +
        head_start == load * (1 - x)``, since attention makes late cells dearer than early ones and
        a byte is a byte. ``head_start``: seconds for which loads may go on after compute has done
        its share. None while compute is unknown.
        """
        compute = self.seconds(work)
        rates = self.compute.rates
        if compute is None or rates is None:
            return None
        if load is None:
            return compute + head_start
        rest = load - head_start
        if rest <= 0.0 or compute <= 0.0:
            return max(load, 0.0)
        square = rates[2] * work.attention
        line = compute - square + load
        if square <= 1e-9 * line:
            return load * (1 - rest / line)
        share = (sqrt(line * line + 4 * square * rest) - line) / (2 * square)
        return load * (1 - share)

"""What is expected, in seconds: the cost models as the scheduler's questions.

Holds the compute model, one model a channel, and what the compute thread is at. Decides nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from cacheflow.costs import ChannelModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheflow.costs import ComputeModel
    from cacheflow.types import Tile

__all__ = ["Outlook"]

_DEPTH_SECONDS: Final = 0.02
"""Loads in flight should cover this much of a channel's time, so that it never runs dry."""


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
        self._max_load_bytes = max_load_bytes
        self._claim_ahead = claim_ahead
        self._current: Tile | None = None
        self._claimed_at = 0.0
        self._streak = 0

    def channel(self, name: str) -> ChannelModel:
        """The model of channel ``name``, made on first use."""
        return self.channels.setdefault(name, ChannelModel())

    # -- compute -------------------------------------------------------------------------------

    def layer_seconds(self, tile: Tile) -> float | None:
        return self.compute.layer_seconds(tile)

    def layer_bound(self, tile: Tile) -> float | None:
        """Seconds within which a layer is done nearly always: late compute cannot be taken back."""
        seconds = self.compute.layer_seconds(tile)
        return None if seconds is None else seconds * (1 + 2 * self.compute.lateness)

    def claimed(self, tile: Tile | None, now: float) -> None:
        """The compute thread begins a layer of ``tile`` (None: it stops); learns from the last."""
        if self._current is not None:
            if self._streak > self._claim_ahead:
                self.compute.observe(self._current, now - self._claimed_at)
            self._streak += 1
        if tile is None or tile != self._current:
            self._streak = 1
        self._current = tile
        self._claimed_at = now

    def current_left(self, now: float) -> float:
        """Seconds until the layer being computed is done."""
        if self._current is None:
            return 0.0
        cost = self.compute.layer_seconds(self._current) or 0.0
        return max(0.0, self._claimed_at + cost - now)

    # -- loads ---------------------------------------------------------------------------------

    def load_seconds(self, channel: str, nbytes: int, now: float) -> float | None:
        """Seconds until ``nbytes`` more, asked for now, would be there."""
        model = self.channel(channel)
        return model.left(model.in_flight_bytes + nbytes, now)

    def loads_left(self, free: Mapping[str, int], now: float) -> float | None:
        """Seconds until all in flight and all ``free`` bytes of every channel would be there.

        None while a channel that is needed has shown nothing; 0 when nothing is left to load.
        """
        longest = 0.0
        for name, nbytes in free.items():
            model = self.channel(name)
            if nbytes or model.in_flight:
                seconds = model.left(model.in_flight_bytes + nbytes, now)
                if seconds is None:
                    return None
                longest = max(longest, seconds)
        return longest

    def transfer_seconds(self, free: Mapping[str, int]) -> float:
        """The same by bandwidth alone, as if nothing were late (0 where nothing is known)."""
        longest = 0.0
        for name, nbytes in free.items():
            model = self.channel(name)
            if model.bandwidth:
                longest = max(longest, (model.in_flight_bytes + nbytes) / model.bandwidth)
        return longest

    def flip(self, free: Mapping[str, int], seconds: float, now: float) -> float:
        """When :meth:`loads_left` will exceed ``seconds`` if nothing is delivered before."""
        times = [float("inf")]
        for name, nbytes in free.items():
            model = self.channel(name)
            times.append(model.slower_than(seconds, model.in_flight_bytes + nbytes, now))
        return min(times)

    def has_room(self, channel: str) -> bool:
        """Whether another load would keep the channel busy rather than queue behind it."""
        model = self.channel(channel)
        if model.bandwidth is None:
            return model.in_flight == 0
        return model.in_flight < 2 or model.in_flight_bytes < model.bandwidth * _DEPTH_SECONDS

    def unit_layers(
        self, channel: str, stride: int, free: int, parts: int, least_seconds: float
    ) -> int:
        """Layers of ``stride`` bytes in one load: about 1/``parts`` of what the channel has left.

        One while its bandwidth is unknown: a probe should cost little.
        """
        model = self.channel(channel)
        if not model.bandwidth:
            return 1
        share = (model.in_flight_bytes + free) / parts
        nbytes = min(max(share, model.bandwidth * least_seconds), self._max_load_bytes)
        return max(1, int(nbytes / stride))

    # -- both ----------------------------------------------------------------------------------

    def gain(
        self, cells: Iterable[tuple[Tile, int]], free: Mapping[str, int], now: float
    ) -> float | None:
        """Share of the load-only time saved when recompute takes cells from the front.

        ``cells``: tiles in order with their number of free cells. Fluid: the two meet where the
        seconds to compute what is before equal the seconds to load what is behind.
        """
        load = self.loads_left(free, now)
        if load is None or not self.compute.known:
            return None
        cells = [(tile, count) for tile, count in cells if count]
        size = sum(tile.width * count for tile, count in cells)
        if load <= 0.0 or not size:
            return 0.0
        spent, taken = 0.0, 0.0
        for tile, count in cells:
            cost = (self.layer_seconds(tile) or 0.0) * count
            share = tile.width * count / size
            remaining = load * (1 - taken)
            if spent + cost >= remaining - load * share:
                # Meets inside this tile: spent + x * cost == load * (1 - taken - x * share).
                part = (remaining - spent) / (cost + load * share)
                return 1 - (spent + part * cost) / load
            spent, taken = spent + cost, taken + share
        return 1 - spent / load

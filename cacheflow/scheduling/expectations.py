"""What is left of one request, in seconds: by loads, by compute, by both ends at once.

Asks the outlook for costs and the ledger for amounts. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.outlook import Work
from cacheflow.scheduling.planned import Planned
from cacheflow.scheduling.rows import Rows, dense_tiles
from cacheflow.scheduling.sharing import Sharing

if TYPE_CHECKING:
    from cacheflow.scheduling.glance import Glance
    from cacheflow.types import Coverage, Load

__all__ = ["Expectations"]

_INFINITE: Final = float("inf")
_STAKE: Final = 0.035
"""Of recompute alone: what a channel that does not answer may cost where loads are so fast that
recompute is not begun."""


class Expectations(Sharing):
    """A ledger that knows what things are expected to take."""

    __slots__ = ()

    def extend(self, coverage: Coverage) -> None:
        super().extend(coverage)
        self.settle_rows()

    def settle_rows(self) -> None:
        """Find out which leading tiles compute takes row by row, if that is due and costs are
        known. Until then it goes tile by tile, which rows may follow at any point."""
        if not self._rows_due or self._outlook.compute.is_guess:
            return
        self._rows_due = False
        first = max(self.led, self.filled)
        seconds = [self._outlook.layer_seconds(state.work) for state in self.tiles[first:]]
        widths = [state.tile.width for state in self.tiles[first:]]
        if tiles := dense_tiles(widths, [each or 0.0 for each in seconds]):
            self._rows = Rows.of(first + tiles, self.spec.num_layers)

    def remaining(self, now: float) -> float:
        """Seconds to the end of the suffix with all resources to itself (0 if nothing is known)."""
        outlook = self._outlook
        whole = outlook.seconds(self.todo)
        loads = self.loads_left(now, alone=True)
        if whole is None:
            return loads or 0.0
        suffix = whole - (outlook.seconds(self.free) or 0.0)
        hidden = min(self._overlap(), suffix)
        free, busy = self.free, hidden
        if self.stuck.count:  # Loads may go on while compute does what only it can do.
            free = Work(free.count, free.linear, free.attention)
            free.add_all(self.stuck, -1)
            busy += outlook.seconds(self.stuck) or 0.0
        both = outlook.meeting(free, loads, busy) or 0.0
        return max(both, busy) + suffix - hidden

    @property
    def suffix_seconds(self) -> float:
        """What is left of the suffix (0 while nothing is known)."""
        outlook = self._outlook
        return (outlook.seconds(self.todo) or 0.0) - (outlook.seconds(self.free) or 0.0)

    @property
    def layer_cost(self) -> float:
        """Seconds of one layer of what compute is at (0 while nothing is known)."""
        work = self._suffix_work[0]
        if self._running:
            work = self.tiles[self._running.bit_length() - 1].work
        return self._outlook.layer_seconds(work) or 0.0

    def _suffix_layer(self) -> float:
        """Seconds of a layer of the first suffix piece, if loads can hide behind it."""
        return (self._outlook.layer_seconds(self._suffix_work[0]) or 0.0) if self._hides else 0.0

    def _overlap(self) -> float:
        """Seconds for which loads may go on at most after compute has turned to the suffix."""
        return (self.spec.num_layers - self.suffix_low[0] - 1) * self._suffix_layer()

    def _left_to_loads(self, left: float) -> float:
        """Seconds until the first suffix piece ends if all the rest, ``left`` seconds, is loaded.

        A layer only has to be there before the suffix reaches it, and loads then come in that
        order: ``max(arrival(layer) + suffix from that layer on)`` over the layers where the free
        cells of some tile end.
        """
        layer = self._suffix_layer()
        last = self.spec.num_layers
        free = [(self.tiles[t].free, self.tiles[t].work[0]) for t in self._free_tiles()]
        ends = {layers.bit_length() for layers, _ in free}
        total = sum(self.free_bytes.values())
        flying = sum(self._outlook.channels[c].in_flight_bytes for c in self._strides)
        free_seconds = left * total / (total + flying) if total else 0.0
        latest = max((last - self.suffix_low[0]) * layer, left + layer)
        cells = self.free.linear or 1.0
        for end in ends:
            below = (1 << end) - 1
            share = sum((layers & below).bit_count() * work for layers, work in free)
            arrival = left - free_seconds * (1 - share / cells)
            latest = max(latest, arrival + (last - end + 1) * layer)
        return latest

    def loads_left(self, now: float, *, alone: bool = False) -> float | None:
        """Seconds until all in flight and all free bytes of every channel would be there.

        ``alone``: as if no other request were waiting. None while a channel that is needed has
        shown nothing; 0 when nothing is left to load.
        """
        longest, passed, models = 0.0, False, self._outlook.channels
        for channel, loads in self._loads.items():
            model = models[channel]
            nbytes = self.free_bytes[channel] if alone else self._before(channel)
            if self._shared:
                nbytes -= self.free_bytes[channel] - self._only[channel]
            if nbytes > 0 or loads:
                seconds = model.left(self._queued(channel, nbytes), now)
                if seconds is None:
                    return None
                if seconds > longest:
                    longest = seconds
                passed = passed or model.was_passed
        if passed and not alone:  # nobody's rank suffers from a load that hangs: compute will have
            longest = max(longest, self._lag(now))  # its cells
        if self._shared and self._strides:
            nbytes = sum(self._only.values()) + self._shared * max(self._strides.values())
            shared = self._outlook.shared_seconds(self._strides, nbytes)
            return None if shared is None else max(longest, shared)
        return longest

    def _lag(self, now: float) -> float:
        """Seconds for which a load that others pass is expected to hang on (0 without one)."""
        models = self._outlook.channels
        flights = self._flights.values()
        return max((models[load.channel].lag(load.id, now) for load in flights), default=0.0)

    def _before(self, channel: str) -> int:
        """Bytes that ``channel`` has still to be asked for until this request is loaded."""
        nbytes = self.free_bytes[channel]
        if nbytes and not self.is_first_to_compute:
            ahead = self._outlook.bytes_ahead[channel]
            nbytes += ahead - (self.own_bytes(channel) if self.compute_turned_away else 0)
        return nbytes

    def _queued(self, channel: str, nbytes: int) -> int:
        """Bytes on their way and ``nbytes`` more; without any more, only up to the last of its own:
        what others asked for later does not keep it waiting."""
        model = self._outlook.channels[channel]
        if nbytes > 0 or channel not in self._last_load:
            return model.in_flight_bytes + nbytes
        return model.ahead(self._last_load[channel])

    def _work_before(self, channel: str) -> float:
        """Seconds of compute for more urgent requests, from which ``channel`` has turned away."""
        if self.is_first_to_load:
            return 0.0
        ahead = self._outlook.seconds(self._outlook.work_ahead[channel]) or 0.0
        own = 0.0
        if channel in self.turned_away:
            own = self._outlook.seconds(self.todo) or 0.0
            own -= self._outlook.seconds(self._led_free) or 0.0
        return ahead - own

    def _compute_to(self, t: int, layer: int, now: float) -> float | None:
        """Seconds until compute would have finished cell ``(t, layer)`` if loads left it alone."""
        outlook, rows = self._outlook, self._rows
        total = outlook.seconds(self.free)
        if total is None:
            return None
        in_rows = t < rows.tiles
        first = self.led if in_rows else t
        behind = self._has_free >> first << first
        while behind:
            i = (behind & -behind).bit_length() - 1
            state = self.tiles[i]
            if i == t:
                beyond = state.free >> (layer + 1)
            elif in_rows and i < rows.tiles:
                beyond = state.free >> (rows.behind(layer) if i < t else rows.first(layer))
            else:
                beyond = state.free
            total -= (outlook.layer_seconds(state.work) or 0.0) * beyond.bit_count()
            behind &= behind - 1
        return total + outlook.current_left(now)

    def _reached(self, channel: str, t: int, layer: int, now: float) -> float | None:
        """Seconds until cell ``(t, layer)`` would be ready if ``channel`` left it alone: by
        compute, or by another channel that has all the rest as well."""
        if self._pools and self._outlook.requests > 1:
            work = self._outlook.seconds(self._outlook.all_work)
            return None if work is None else work + self._outlook.current_left(now)
        compute = self._compute_to(t, layer, now)
        if compute is not None:
            compute += self._work_before(channel)
            if self.policy.overlaps:
                compute += layer * (self._outlook.layer_seconds(self._suffix_work[0]) or 0.0)
        for other in self._strides:
            if other != channel and self.tiles[t].wanted.get(other, 0) >> layer & 1:
                model = self._outlook.channels[other]
                nbytes = model.in_flight_bytes + self.free_bytes[other]
                seconds = model.left(nbytes, now) if model.bandwidth else None
                if seconds is not None:
                    compute = seconds if compute is None else min(compute, seconds)
        return compute

    def _flip(self, seconds: float, now: float) -> float:
        """When :meth:`loads_left` will exceed ``seconds`` if nothing is delivered before."""
        times = [_INFINITE]
        for channel in self._strides:
            nbytes, model = self._before(channel), self._outlook.channels[channel]
            if model.in_flight:
                when = model.slower_than(seconds, self._queued(channel, nbytes), now)
            elif nbytes:  # About to start, by all that is known.
                when = now + max(seconds, self._outlook.transfer_seconds(channel, nbytes))
            else:
                continue
            times.append(when)
        for load in self._flights.values():
            lags = self._outlook.channels[load.channel].lags_from(load.id, seconds)
            times.append(max(lags, now))
        return min(times)

    def _silent_from(self, now: float) -> float:
        """When loads will have been silent for so long that waiting on would cost more than is at
        stake, those that are about to start included. Never where others wait for compute: it is
        not there to be tried then."""
        if self._outlook.requests > 1 or not (stake := self._stake):
            return _INFINITE
        models = [self._outlook.channels[name] for name, loads in self._loads.items() if loads]
        return max((model.silent_from(stake) for model in models), default=now + stake)

    @property
    def _stake(self) -> float:
        """Seconds that a channel which does not answer may cost."""
        return _STAKE * (self._outlook.seconds(self.todo) or 0.0)

    def _late_at(self, load: Load, seconds: float, now: float) -> float:
        """When a load under way will look ``seconds`` away if nothing is delivered before."""
        model = self._outlook.channels[load.channel]
        late = model.slower_than(seconds, model.ahead(load.id), now)
        return min(late, max(model.lags_from(load.id, seconds), now))

    def _gain(self, load: float | None) -> float | None:
        """Share of ``load``, seconds for which all would be loaded, that both ends together would
        save, if all is known."""
        if load is None:
            return None
        both = self._outlook.meeting(self.free, load, self._overlap())
        if both is None:
            return None
        return 1 - both / load if load > 0.0 else 0.0

    def _patience(self, glance: Glance) -> float:
        """How far loads may fall behind before a recompute that was not worth starting starts:
        twice what they should take, less where that is much beside what recompute will take."""
        begins = self.begun or self._outlook.was_surprised
        if begins or self.policy.begin(self._gain(glance.left)):
            return 0.0
        transfer = max(
            (self._outlook.transfer_seconds(c, self._before(c)) for c in self._strides),
            default=0.0,
        )
        return min(2.0 * transfer, max(1.1 * transfer, self._stake))

    def plan(self, compute_backlog: float, load_backlog: float) -> None:
        """Fix the staircase now, if the policy does that and all costs are known."""
        layer = [self._outlook.layer_seconds(state.work) for state in self.tiles]
        bandwidth = sum(self._outlook.channels[c].bandwidth or 0.0 for c in self._strides)
        if not bandwidth or None in layer:
            return
        stride = max(self._strides.values())
        chunk = self.spec.chunk_tokens
        self.heights = self.policy.plan(
            Planned(
                num_layers=self.spec.num_layers,
                layer_seconds=[seconds or 0.0 for seconds in layer],
                load_seconds=[t.width // chunk * stride / bandwidth for t in self.spec.tiles],
                compute_backlog=compute_backlog,
                load_backlog=load_backlog,
            )
        )

    def planned(self) -> tuple[float, float]:
        """Seconds of compute (suffix included) and of loads that the plan still asks for; without a
        plan, of computing everything."""
        compute, load = self.suffix_seconds, 0.0
        for t, state in enumerate(self.tiles):
            free = state.free
            below = free if self.heights is None else free & ((1 << self.heights[t]) - 1)
            compute += below.bit_count() * (self._outlook.layer_seconds(state.work) or 0.0)
            width = state.tile.width // self.spec.chunk_tokens
            for channel, stride in self._strides.items():
                bandwidth = self._outlook.channels[channel].bandwidth
                if bandwidth:
                    load += (free & ~below).bit_count() * width * stride / bandwidth
        return compute, load

"""The load side of one request: which cells a channel should be asked for next.

From the back, tile by tile and layer by layer; what holes depend on first; and what can hide behind
the suffix last, in the order in which the suffix will need it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.closing import Closing
from cacheflow.scheduling.feeding import Reach
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheflow.scheduling.glance import Glance

__all__ = ["Loading", "Reach"]

_UNITS: Final = 128
"""A load should take about this fraction of what is left, so that the last ones end together."""
_LEAST_UNIT_SECONDS: Final = 0.004
"""Below this the cost of a load's own steps would show."""
_MOST: Final = 1 << 30
_PLANNED_SHARE: Final = 0.1
"""From this share of the time left on, what the suffix can hide decides the order of loads."""
_LEAST_HELD: Final = 2
"""Cells: fewer would win less than a load that lands late costs."""


class Loading(Closing):
    """A request as channels see it."""

    __slots__ = ()

    def next_reach(self, channel: str, glance: Glance) -> Reach | None:
        """What ``channel`` should be asked for next: an activation that compute is about to need,
        else cells from the back."""
        if self.cancelled or channel not in self._strides:
            return None
        if self.spec.fed and (feed := self.next_feed(channel, glance)) is not None:
            return feed
        if not self.own_bytes(channel):
            return None
        if self._by_layers:
            return self._top_layer(channel, glance.now)
        return self._worth_asking(channel, glance) or self._retry(channel, glance.now)

    def _retry(self, channel: str, now: float) -> Reach | None:
        """One load from a channel that is believed too slow, now and then; compute may overtake
        it."""
        if not (self.policy.hedges and self._outlook.is_due(channel, 0, now)):
            return None  # nearly always: what it could be asked for need not be looked for
        if not (masks := self._allowed_from(0, channel)):
            return None
        reach = self._last_computed(channel, masks)
        return reach if self._outlook.is_due(channel, reach.nbytes, now) else None

    def _worth_asking(self, channel: str, glance: Glance) -> Reach | None:
        """What is expected to be there sooner than recompute would have it."""
        ending = glance.ending
        if ending is not None:
            masks = {}
            for t, planned in ending.loads().items():
                if mask := planned & self._allowed(t, channel):
                    masks[t] = mask
            if masks and self._outlook.channels[channel].is_in_doubt:
                return self._last_computed(channel, masks)
            return self._lowest_layer(channel, masks) if masks else None
        held = self._held_back(channel, glance) if self.policy.overlaps else {}
        if held and self.leaves:
            return self._lowest_layer(channel, held)
        for t, mask in self._loadable(channel, held, glance):
            if mask:
                later = self._seconds_for(channel, held) if held else 0.0
                reach = self._cut(channel, t, mask, glance.now, later)
                if reach is not None or not held:
                    return reach
                break  # Compute has the rest sooner; what is held back waits for nothing else.
        return self._lowest_layer(channel, held) if held else None

    def _held_back(self, channel: str, glance: Glance) -> dict[int, int]:
        """Cells by tile that come last and from the lowest layer up, because they can hide behind
        the suffix: all once compute has left them, before that as many of the highest layers as
        arrive while the suffix is computed."""
        if self.leaves:
            return self._allowed_from(0, channel)
        meeting = self._meeting_tile(glance)
        if meeting is None:
            return {}
        stride = self._strides[channel] / self.spec.chunk_tokens
        room = self._overlap() * (self._outlook.channels[channel].bandwidth or 0.0) / stride
        if room < _LEAST_HELD * self.tiles[meeting].tile.width:
            return {}
        allowed = self._allowed_from(meeting, channel)
        widths: dict[int, int] = {}  # Most tiles are untouched, and so alike.
        for t, mask in allowed.items():
            widths[mask] = widths.get(mask, 0) + self.tiles[t].tile.width

        def fits(low: int) -> bool:
            tokens = 0
            for mask, width in widths.items():
                tokens += (mask >> low).bit_count() * width
            return tokens <= room

        low = bisect_left(range(self.spec.num_layers), True, key=fits)
        return {t: mask >> low << low for t, mask in allowed.items() if mask >> low}

    def _meeting_tile(self, glance: Glance) -> int | None:
        """The tile in which compute is expected to leave the rest to loads; None where the suffix
        is too short to plan for."""
        if not (self.is_first_to_load and self.is_first_to_compute and self._has_free):
            return None
        hidden, left = self._overlap(), glance.left
        if left is None or hidden < _PLANNED_SHARE * left:
            return None
        if self._holes & self._has_free:
            return None
        for t, spent, rest in self._walk(hidden, left):
            if spent >= rest:
                return self.led if t < self._rows.tiles else t
        return None

    def _lowest_layer(self, channel: str, masks: Mapping[int, int]) -> Reach:
        """One load of the lowest layers: of one tile as long as no other has lower ones, or as many
        as the loads are ahead of the suffix, which is in no hurry for them then."""
        lows = [((mask & -mask).bit_length() - 1, t) for t, mask in masks.items()]
        low, t = lowest = min(lows)
        state = self.tiles[t]
        chunks = state.chunks_for(channel, low)
        stride = self._strides[channel] * len(chunks)
        ahead = max(low - self.suffix_low[0], 1)
        lows.remove(lowest)
        others = min(lows)[0] if lows else _MOST
        stop = min(max(others, low + ahead), low + self._unit(channel, stride))
        taken = ~(masks[t] >> low)
        stop = min(stop, low + (taken & -taken).bit_length() - 1)
        top = low + state.alike(channel, range(low, stop))
        return Reach(t, Span(low, top), chunks, stride * (top - low))

    def _last_computed(self, channel: str, masks: Mapping[int, int]) -> Reach:
        """One load of what compute would come to last, and so the least likely to be in vain."""
        rows = self._rows.tiles
        t = max(masks, key=lambda t: (max(t, rows - 1), masks[t].bit_length(), t))
        chunks, top, unit = self._topmost(channel, t, masks[t])
        nbytes = self._strides[channel] * len(chunks) * unit
        return Reach(t, Span(top + 1 - unit, top + 1), chunks, nbytes)

    def _allowed_from(self, first: int, channel: str) -> dict[int, int]:
        """Free cells from tile ``first`` on that ``channel`` may load, by tile; tiles without any
        left out."""
        found = {}
        for t in self._free_tiles():
            if t >= first and (mask := self._allowed(t, channel)):
                found[t] = mask
        return found

    def _allowed(self, t: int, channel: str) -> int:
        state = self.tiles[t]
        if t < self.led or (self._whole_tiles and (state.low or state.running) and not state.must):
            return 0
        mask = state.wanted.get(channel, 0)
        if self.heights is not None:
            mask = mask >> self.heights[t] << self.heights[t]
        return mask

    def _top_layer(self, channel: str, now: float) -> Reach | None:
        masks = [self._allowed(t, channel) for t in range(len(self.tiles))]
        top = max(mask.bit_length() for mask in masks) - 1
        for t in range(len(masks) - 1, -1, -1):
            if top >= 0 and masks[t] >> top & 1:
                return self._cut(channel, t, 1 << top, now)
        return None

    def _load_order(self, glance: Glance) -> Iterator[int]:
        """Tiles of which anything can be loaded: backward, but what a hole depends on before what
        lies behind it, unless compute gets there from the front in time."""
        wanted = self._has_wanted >> self.led << self.led
        holes = self._holes and self._out_of_reach(glance)
        while wanted:
            # Up to the next hole, which is itself behind it.
            below = (holes & -holes) - 1 if holes else -1
            tiles = wanted & below
            while tiles:
                t = tiles.bit_length() - 1
                tiles ^= 1 << t
                yield t
            wanted &= ~below
            holes &= holes - 1 if holes else 0

    def _loadable(
        self, channel: str, held: Mapping[int, int], glance: Glance
    ) -> Iterator[tuple[int, int]]:
        """Tiles with what of them may be loaded and is not held back, backward; where compute goes
        row by row, the tile that loads have come down least in."""
        for t in self._load_order(glance):
            if t >= self._rows.tiles or self._holes or t < self.led:
                yield t, self._allowed(t, channel) & ~held.get(t, 0)
                continue
            masks = {i: self._allowed(i, channel) & ~held.get(i, 0) for i in range(self.led, t + 1)}
            top = max(masks, key=lambda i: (masks[i].bit_length(), i))
            yield top, masks[top]
            return

    def _out_of_reach(self, glance: Glance) -> int:
        """A bitmap of the holes that lie behind where compute and loads would meet if there were
        none: compute comes by the others anyway. All, while nothing is known."""
        left, holes = glance.left, self._holes
        if left is None or not self.policy.hedges or not self.is_first_to_compute:
            return holes
        busy = self._overlap() + self._outlook.current_left(glance.now)
        for t, spent, rest in self._walk(busy, left):
            if spent > rest:
                break
            holes &= ~(1 << t)
        return holes

    def _walk(self, spent: float, left: float) -> Iterator[tuple[int, float, float]]:
        """Tiles with free cells, from the front on: when compute, busy for ``spent`` seconds
        before, is through with each, and how much of ``left``, what loads take, is then left."""
        rate = left / (self.free.linear or 1.0)
        for t in self._free_tiles():
            state = self.tiles[t]
            count = state.free.bit_count()
            spent += count * (self._outlook.layer_seconds(state.work) or 0.0)
            left -= count * state.work[0] * rate
            yield t, spent, left

    def _seconds_for(self, channel: str, masks: Mapping[int, int]) -> float:
        """What ``channel`` takes for these cells."""
        count = (
            sum(mask.bit_count() * self.tiles[t].tile.width for t, mask in masks.items())
            // self.spec.chunk_tokens
        )
        bandwidth = self._outlook.channels[channel].bandwidth
        return count * self._strides[channel] / bandwidth if bandwidth else 0.0

    def _cut(self, channel: str, t: int, mask: int, now: float, later: float = 0.0) -> Reach | None:
        """The topmost layers of ``mask`` with the same chunks, as many as one load should have.

        ``later``: seconds of loads that are held back behind these.
        """
        chunks, top, unit = self._topmost(channel, t, mask)
        stride = self._strides[channel] * len(chunks)
        for low in (top + 1 - unit, top):
            nbytes = stride * (top - low + 1)
            load = self._outlook.load_seconds(channel, nbytes, now)
            probes = self.policy.hedges and self._outlook.is_probing(channel, nbytes)
            reached = self._reached(channel, t, low, now)
            if reached is not None and later:
                # The suffix hides so much of what is held back behind this load, and no more.
                hides = (self.spec.num_layers - 1 - low) * self._suffix_layer()
                reached -= max(later - hides, 0.0)
            if probes or self.policy.load(load, reached):
                return Reach(t, Span(low, top + 1), chunks, nbytes)
            if top == low:
                break
        return None

    def _topmost(self, channel: str, t: int, mask: int) -> tuple[tuple[int, ...], int, int]:
        """The chunks that the highest layer of ``mask`` needs, that layer, and how many from it
        down are alike and may be one load."""
        state = self.tiles[t]
        top = mask.bit_length() - 1
        chunks = state.chunks_for(channel, top)
        gap = (~mask & ((1 << top) - 1)).bit_length()  # The layers above it are one run.
        unit = min(top + 1 - gap, self._unit(channel, self._strides[channel] * len(chunks)))
        return chunks, top, state.alike(channel, range(top, top - unit, -1))

    def _unit(self, channel: str, stride: int) -> int:
        """How many layers one load should carry: a fraction of the time left, in whole layers."""
        free = self.free_bytes[channel]
        return self._outlook.unit_layers(channel, stride, free, _UNITS, _LEAST_UNIT_SECONDS)

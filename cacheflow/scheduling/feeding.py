"""What tiles of a pipeline stage begin with: boundary activations, and when they are worth loading.

In all stages but the first a tile is computed from the hidden state at the stage's first layer. A
stored activation of it is bytes on the same channel as the KV that it saves, so it is fetched only
for tiles in which compute is expected to end up, and shortly before compute gets there; or the
stage before delivers it. Without a hidden state a tile can be loaded and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cacheflow.scheduling.expectations import Expectations
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cacheflow.scheduling.glance import Glance
    from cacheflow.scheduling.outlook import Outlook
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import Coverage, Load, RequestSpec, Tile, TileGrid

__all__ = ["Feeding", "Reach"]

_AHEAD: Final = 2.0
"""An activation is asked for when compute has work for this many times what it takes to come."""
_HIDDEN: Final = Span(0, 1)


class Reach(NamedTuple):
    """Cells (or boundary activations) a channel could be asked for in one load."""

    tile: int
    layers: Span
    chunks: tuple[int, ...]
    nbytes: int
    hidden: bool = False


class _Feed:
    """The hidden state that one tile begins with, chunk by chunk."""

    __slots__ = ("chunks", "flying", "missing", "sources")

    def __init__(self, tile: Tile, chunk_tokens: int) -> None:
        self.chunks = frozenset(range(tile.start // chunk_tokens, tile.stop // chunk_tokens))
        self.missing = set(self.chunks)
        self.flying: set[int] = set()
        self.sources: dict[str, set[int]] = {}

    @property
    def coming(self) -> bool:
        """All of it is here or on its way."""
        return self.missing <= self.flying

    @property
    def storable(self) -> bool:
        """What is missing can be had from channels."""
        return self.missing <= self.flying.union(*self.sources.values())

    def left(self, channel: str) -> tuple[int, ...]:
        """Chunks to ask ``channel`` for."""
        return tuple(sorted((self.missing - self.flying) & self.sources.get(channel, set())))


class Feeding(Expectations):
    """A request whose tiles have to be fed, if its spec says so."""

    __slots__ = ("_asked", "_feeds", "_hidden_strides", "suffix_fed")

    def __init__(
        self, spec: RequestSpec, policy: Policy, outlook: Outlook, *, pools: bool = False
    ) -> None:
        super().__init__(spec, policy, outlook, pools=pools)
        fed = spec.tiles if spec.fed else ()
        self._feeds = [_Feed(tile, spec.chunk_tokens) for tile in fed]
        self.suffix_fed = [not spec.fed] * len(spec.suffix)
        self._asked: set[int] = set()
        """Tiles that the stage before has been asked for."""
        self._hidden_strides: dict[str, int] = {}

    def is_fed(self, t: int) -> bool:
        """Whether compute of tile ``t`` can begin."""
        return not self._feeds or not self._feeds[t].missing

    # -- what happens --------------------------------------------------------------------------

    def extend(self, coverage: Coverage) -> None:
        super().extend(coverage)
        self._hidden_strides[coverage.channel] = coverage.hidden_stride
        known = {chunk for chunk, there in enumerate(coverage.hidden) if there}
        for feed in self._feeds:
            feed.sources[coverage.channel] = known & feed.chunks

    def drop_channel(self, channel: str) -> None:
        super().drop_channel(channel)
        for feed in self._feeds:
            feed.sources.pop(channel, None)

    def start(self, load: Load) -> None:
        if load.hidden:
            self._loads[load.channel] += 1
            self._last_load[load.channel] = load.id
            self._feeds[load.tile].flying.update(load.chunks)
        else:
            super().start(load)

    def commit(self, load: Load) -> int:
        """As ever; of a load of activations 1 if they are still wanted."""
        if not load.hidden:
            return super().commit(load)
        wanted = self._feeds[load.tile].missing.intersection(load.chunks)
        return int(bool(wanted) and not self.cancelled)

    def landed(self, load: Load, layers: int) -> None:
        if not load.hidden:
            super().landed(load, layers)
            return
        self._loads[load.channel] -= 1
        feed = self._feeds[load.tile]
        feed.flying.difference_update(load.chunks)
        if layers:
            feed.missing.difference_update(load.chunks)

    def lost(self, load: Load, chunks: Sequence[int]) -> None:
        if not load.hidden:
            super().lost(load, chunks)
            return
        self._loads[load.channel] -= 1
        feed = self._feeds[load.tile]
        feed.flying.difference_update(load.chunks)
        feed.sources.get(load.channel, set()).difference_update(chunks)

    def lengthen(self, total_tokens: int, grid: TileGrid) -> None:
        super().lengthen(total_tokens, grid)
        self.suffix_fed = [not self.spec.fed] * len(self.spec.suffix)

    def feed(self, start: int) -> None:
        """The stage before has delivered the tile, or suffix piece, that begins at ``start``."""
        for i, piece in enumerate(self.spec.suffix):
            if piece.start == start:
                self.suffix_fed[i] = True
                self._hides = self.policy.overlaps and self.suffix_fed[0]
                return
        for t in self._tiles_at(start):
            if self._feeds:
                self._feeds[t].missing.clear()

    def starve(self, t: int) -> None:
        """The hidden state of tile ``t`` is gone."""
        if self._feeds:
            self._feeds[t].missing.update(self._feeds[t].chunks)
            self._asked.discard(t)

    def pass_on(self, start: int) -> None:
        """See :meth:`BatchScheduler.pass_on`."""
        for t in self._tiles_at(start):
            state = self.tiles[t]
            state.passing = True
            if state.low == self.spec.num_layers and not state.running:
                state.low = 0
                self.starve(t)
            self._refresh(t)

    def starving(self) -> list[int]:
        """First tokens of tiles that only the stage before can feed; each named once."""
        found = []
        for t in self._unfed():
            if self._is_left_to_compute(t) and not self._feeds[t].storable and t not in self._asked:
                self._asked.add(t)
                found.append(self.tiles[t].tile.start)
        return found

    def _is_left_to_compute(self, t: int) -> bool:
        """Whether no load will ever complete the tile: there is none, or the policy says so."""
        planned = self.heights is not None and self.heights[t] > 0
        return bool(self.tiles[t].must) or planned or not self.policy.load(0.0, 1.0)

    def _tiles_at(self, start: int) -> Iterable[int]:
        return (t for t, state in enumerate(self.tiles) if state.tile.start == start)

    # -- what is worth loading -----------------------------------------------------------------

    def next_feed(self, channel: str, glance: Glance) -> Reach | None:
        """The activation that ``channel`` should be asked for now, if any."""
        for t in self._unfed():
            feed = self._feeds[t]
            if feed.coming:
                continue
            chunks = feed.left(channel)
            if not (chunks and feed.storable):
                return None  # nothing behind it can be computed before it
            stride = self._hidden_strides[channel]
            chunks = chunks[: max(1, self._outlook.max_load_bytes // stride)]
            if self.tiles[t].must or self._worth_feeding(t, channel, glance):
                return Reach(t, _HIDDEN, chunks, stride * len(chunks), hidden=True)
            return None
        return None

    def _unfed(self) -> Iterator[int]:
        """Tiles that compute may have to begin and cannot, in order."""
        tiles = self._open if self._feeds else 0
        while tiles:
            t = (tiles & -tiles).bit_length() - 1
            tiles &= tiles - 1
            state = self.tiles[t]
            if not self.is_fed(t) and (state.free or state.must > state.low):
                yield t

    def _worth_feeding(self, t: int, channel: str, glance: Glance) -> bool:
        """Whether all would be done sooner with tile ``t`` fed, and whether it is time."""
        nbytes = self._hidden_strides[channel] * len(self._feeds[t].missing)
        if nbytes >= self._bytes_of(t):
            return False
        ahead = [i for i in self._free_tiles() if i < t]
        cost, left = self._outlook.layer_seconds(self.tiles[t].work), glance.left
        speed = sum(self._outlook.channels[c].bandwidth or 0.0 for c in self._strides)
        if cost is None or left is None or not speed:
            return not ahead and self.policy.compute(None, None)
        if not self.begun and not self.policy.begin(self._gain(left)):
            return False
        model = self._outlook.channels[channel]
        computed = sum(map(self._seconds_of, ahead)) + self._outlook.current_left(glance.now)
        queued = model.in_flight_bytes + _AHEAD * nbytes
        if computed > model.latency + queued / (model.bandwidth or speed):
            return False
        saved = sum(map(self._bytes_of, ahead)) / speed
        without = _meeting(computed, saved, left)
        saved += self._bytes_of(t) / speed
        with_it = _meeting(computed + self._seconds_of(t), saved, left + nbytes / speed)
        return self.policy.compute(with_it, without)

    def _seconds_of(self, t: int) -> float:
        """What compute has left of tile ``t``."""
        state = self.tiles[t]
        return state.free.bit_count() * (self._outlook.layer_seconds(state.work) or 0.0)

    def _bytes_of(self, t: int) -> int:
        """What channels have left of tile ``t``."""
        return self.tiles[t].union * max(self._strides.values())

    def _compute_to(self, t: int, layer: int, now: float) -> float | None:
        """None where compute will not get for want of a hidden state."""
        if any(not self._feeds[i].coming for i in self._unfed() if i <= t):
            return None
        return super()._compute_to(t, layer, now)


def _meeting(computed: float, saved: float, left: float) -> float:
    """When all is there: compute needs ``computed`` for what it has, which would save loads
    ``saved`` of the ``left`` seconds they need without it."""
    if computed <= left - saved:
        return left - saved
    return computed * left / (computed + saved)

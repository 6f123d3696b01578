"""The state of one tile of one request: which of its cells are ready, claimed or loadable.

Layers are bits of an integer. What decisions ask for is kept up to date when something changes
(:meth:`TileState.refresh`), so that asking costs nothing. Pure state: no locks, clocks or costs.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.types import Load, Span, Tile

__all__ = ["Part", "TileState", "bits"]


def bits(span: Span) -> int:
    """Bitmap of a span of layers."""
    return (1 << span.stop) - (1 << span.start)


class Part:
    """Chunks of a tile that have the same sources and the same fate, mostly all of them."""

    __slots__ = ("chunks", "in_flight", "loaded", "sources")

    def __init__(
        self,
        chunks: tuple[int, ...],
        sources: dict[str, int] | None = None,
        in_flight: int = 0,
        loaded: int = 0,
    ) -> None:
        self.chunks = chunks
        self.sources: dict[str, int] = dict(sources or {})
        """Layers that each channel has."""
        self.in_flight = in_flight
        self.loaded = loaded

    def copy(self, chunks: tuple[int, ...]) -> Part:
        """The same fate for other chunks."""
        return Part(chunks, self.sources, self.in_flight, self.loaded)


class TileState:
    """Cells of one tile. ``low`` is the layer its hidden state is at (0: none was computed)."""

    __slots__ = (
        "_copying",
        "asked",
        "counts",
        "free",
        "full",
        "in_flight",
        "loadable",
        "low",
        "must",
        "only",
        "parts",
        "passing",
        "ready",
        "running",
        "shared",
        "sharers",
        "tile",
        "union",
        "wanted",
        "work",
    )

    def __init__(
        self, tile: Tile, num_layers: int, chunk_tokens: int, work: tuple[float, float]
    ) -> None:
        self.tile = tile
        self.work = work
        """Of one layer, in the compute model's own terms."""
        self.full = (1 << num_layers) - 1
        first = tile.start // chunk_tokens
        self.parts = [Part(tuple(range(first, first + tile.width // chunk_tokens)))]
        self.ready = 0
        """Computed (or enqueued on the compute stream) or published."""
        self._copying: dict[int, int] = {}
        """Layers that each load (by id) may copy in: parts of one cell can come from several."""
        self.low = 0
        self.running = False
        self.sharers = 1
        """Requests that have this tile. No tile has more of them than one before it."""
        self.asked = 0
        """Layers that compute has to pass whatever can be loaded: another rank cannot load them."""
        self.passing = False
        """The stage behind wants what comes out of the last layer: compute has to get there."""
        # Derived, see refresh(); so far no channel has any of it.
        self.loadable = self.in_flight = 0
        self.free, self.must = self.full, num_layers
        self.wanted: dict[str, int] = {}
        """Layers that each channel could usefully be asked for now."""
        self.counts: dict[str, int] = {}
        """How many (chunk, layer) that is."""
        self.only: dict[str, int] = {}
        """How many of them no other channel has."""
        self.union = 0
        """How many (chunk, layer) any channel could be asked for."""
        self.shared = 0
        """How many of them several channels have."""

    @property
    def committing(self) -> int:
        """Verified and being copied into the KV cache: too late to race."""
        mask = 0
        for layers in self._copying.values():
            mask |= layers
        return mask

    @property
    def complete(self) -> bool:
        return self.ready == self.full and not self.passing

    def refresh(self) -> None:
        """Derive what decisions ask for from what happened.

        ``loadable``: layers that every chunk has, will have or can get. ``must``: compute has to
        pass layers ``[0, must)``, since the highest of them cannot be loaded.
        """
        first = self.parts[0]
        if len(self.parts) == 1 and len(first.sources) == 1:  # nearly always
            self._refresh_one(first)
            return
        loadable, in_flight = self.full, 0
        for part in self.parts:
            mask = part.loaded
            for layers in part.sources.values():
                mask |= layers
            loadable &= mask
            in_flight |= part.in_flight
        self.loadable = loadable
        self.in_flight = in_flight & ~self.ready
        self.free = self.full & ~(self.ready | in_flight)
        missing = self.full if self.passing else self.full & ~(loadable | self.ready)
        self.must = max(missing.bit_length(), self.asked)
        floor = max(self.low, self.must)
        usable = (loadable & ~self.ready) >> floor << floor
        self._want(usable)

    def _refresh_one(self, part: Part) -> None:
        """:meth:`refresh` of a tile in one piece that one channel has."""
        ((channel, layers),) = part.sources.items()
        full, ready, loaded, in_flight = self.full, self.ready, part.loaded, part.in_flight
        self.loadable = loadable = full & (loaded | layers)
        self.in_flight = in_flight & ~ready
        self.free = full & ~(ready | in_flight)
        missing = full if self.passing else full & ~(loadable | ready)
        self.must = must = max(missing.bit_length(), self.asked)
        floor = max(self.low, must)
        found = (full & layers & ~(ready | loaded | in_flight)) >> floor << floor
        self.union = found.bit_count() * len(part.chunks)
        self.wanted = {channel: found} if found else {}
        self.counts = self.only = {channel: self.union} if found else {}
        self.shared = 0

    def _want(self, usable: int) -> None:
        self.wanted, self.counts, self.only, self.union = {}, {}, {}, 0
        for part in self.parts:
            mask = usable & ~(part.loaded | part.in_flight)
            size = len(part.chunks)
            union = twice = 0
            for layers in part.sources.values():
                twice |= union & layers
                union |= layers
            self.union += (union & mask).bit_count() * size
            for channel, layers in part.sources.items():
                found = layers & mask
                if found:
                    self.wanted[channel] = self.wanted.get(channel, 0) | found
                    count = found.bit_count() * size
                    self.counts[channel] = self.counts.get(channel, 0) + count
                    alone = (found & ~twice).bit_count() * size
                    self.only[channel] = self.only.get(channel, 0) + alone
        self.shared = self.union - sum(self.only.values())

    def chunks_for(self, channel: str, layer: int) -> tuple[int, ...]:
        """Absolute indices of the chunks that ``channel`` would deliver at the wanted ``layer``."""
        if len(self.parts) == 1:
            return self.parts[0].chunks
        found = [
            part.chunks
            for part in self.parts
            if (part.sources.get(channel, 0) & ~(part.loaded | part.in_flight)) >> layer & 1
        ]
        return found[0] if len(found) == 1 else tuple(sorted(sum(found, ())))

    def alike(self, channel: str, layers: range) -> int:
        """How many of ``layers``, all wanted, have the chunks that the first one has, in a row."""
        if len(self.parts) == 1:
            return len(layers)
        chunks = self.chunks_for(channel, layers[0])
        same = (self.chunks_for(channel, layer) == chunks for layer in layers)
        return sum(takewhile(bool, same))

    # -- what happens; each is followed by a refresh() -------------------------------------------

    def extend(self, channel: str, layers: Sequence[int]) -> None:
        """``channel`` has ``layers[chunk]`` (by absolute index; none where it is too short)."""
        self._limit(channel, layers, lambda known: self.full)

    def restrict(self, channel: str, layers: Sequence[int]) -> None:
        """Of what ``channel`` was known to have, ``layers[chunk]`` at most count from now on."""
        self._limit(channel, layers, lambda known: known)

    def _limit(self, channel: str, layers: Sequence[int], most: Callable[[int], int]) -> None:
        if len(self.parts) == 1:
            part = self.parts[0]
            known = layers[part.chunks[0] : part.chunks[-1] + 1]
            if len(known) == len(part.chunks) == known.count(known[0]):  # nearly always
                if mask := known[0] & most(part.sources.pop(channel, 0)):
                    part.sources[channel] = mask
                return
        parts = []
        for part in self.parts:
            bound = most(part.sources.get(channel, 0))
            groups: dict[int, list[int]] = {}
            for chunk in part.chunks:
                mask = layers[chunk] & bound if chunk < len(layers) else 0
                groups.setdefault(mask, []).append(chunk)
            for mask, chunks in groups.items():
                new = part.copy(tuple(chunks))
                new.sources.pop(channel, None)
                if mask:
                    new.sources[channel] = mask
                parts.append(new)
        self.parts = parts

    def forget(self, channel: str) -> None:
        """``channel`` is not to be counted on any more."""
        for part in self.parts:
            part.sources.pop(channel, None)

    def claim(self, load: Load) -> None:
        """``load`` is on its way."""
        mask = bits(load.layers)
        for part in self._of(load.chunks):
            part.in_flight |= mask

    def commit(self, load: Load, layers: int) -> None:
        """``layers`` of ``load`` are being copied in from now on."""
        self._copying[load.id] = layers

    def landed(self, load: Load, layers: int) -> None:
        """``load`` ended with ``layers`` in place; cells become ready with their last chunk."""
        mask = bits(load.layers)
        for part in self._of(load.chunks):
            part.in_flight &= ~mask
            part.loaded |= layers
        everywhere = self.full
        for part in self.parts:
            everywhere &= part.loaded
        self._copying.pop(load.id, None)
        self.ready |= everywhere & layers

    def lost(self, load: Load, chunks: Iterable[int]) -> None:
        """``load`` failed for ``chunks``: they need another source; the rest may be asked again."""
        mask = bits(load.layers)
        for part in self._of(load.chunks):
            part.in_flight &= ~mask
        for part in self._of(chunks):
            layers = part.sources.pop(load.channel, 0) & ~mask
            if layers:
                part.sources[load.channel] = layers
        self._copying.pop(load.id, None)

    def undo(self, first_layer: int) -> None:
        """What compute has written from ``first_layer`` on is void, and so is its hidden state."""
        loaded = self.full
        for part in self.parts:
            loaded &= part.loaded
        self.ready &= loaded | ((1 << first_layer) - 1)
        self.running, self.low = False, 0

    def _of(self, chunks: Iterable[int]) -> list[Part]:
        """The parts that make up ``chunks``, split off where they were not parts of their own."""
        if len(self.parts) == 1 and self.parts[0].chunks == chunks:
            return self.parts
        wanted = set(chunks)
        found, parts = [], []
        for part in self.parts:
            inside = tuple(chunk for chunk in part.chunks if chunk in wanted)
            if not inside:
                parts.append(part)
                continue
            if len(inside) < len(part.chunks):
                outside = tuple(chunk for chunk in part.chunks if chunk not in wanted)
                parts.append(part.copy(outside))
                part.chunks = inside
            parts.append(part)
            found.append(part)
        self.parts = parts
        return found

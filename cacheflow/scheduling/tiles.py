"""The state of one tile of one request: which of its cells are ready, claimed or loadable.

Layers are bits of an integer. Pure state: no locks, clocks or costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheflow.types import Load, Span, Tile

__all__ = ["ChunkState", "TileState", "bits"]


def bits(span: Span) -> int:
    """Bitmap of a span of layers."""
    return (1 << span.stop) - (1 << span.start)


@dataclass(slots=True)
class ChunkState:
    """Where one chunk can come from, and which of its layers are on the way or here."""

    sources: list[tuple[str, int]] = field(default_factory=list)
    """``(channel, layers)`` in order of preference; an earlier channel hides a later one."""
    in_flight: int = 0
    loaded: int = 0

    @property
    def available(self) -> int:
        mask = self.loaded
        for _, layers in self.sources:
            mask |= layers
        return mask

    def wanted_from(self, channel: str) -> int:
        """Layers that ``channel`` should deliver and has not been asked for yet."""
        hidden = self.loaded | self.in_flight
        for name, layers in self.sources:
            if name == channel:
                return layers & ~hidden
            hidden |= layers
        return 0

    def forget(self, channel: str, layers: int) -> None:
        """``channel`` does not have those layers after all."""
        self.sources = [
            (name, mask & ~layers if name == channel else mask) for name, mask in self.sources
        ]


class TileState:
    """Cells of one tile. ``low`` is the layer its hidden state is at (0: none was computed)."""

    __slots__ = ("_copying", "chunks", "first_chunk", "full", "low", "ready", "running", "tile")

    def __init__(self, tile: Tile, num_layers: int, chunk_tokens: int) -> None:
        self.tile = tile
        self.full = (1 << num_layers) - 1
        self.first_chunk = tile.start // chunk_tokens
        self.chunks = [ChunkState() for _ in range(tile.width // chunk_tokens)]
        self.ready = 0
        """Computed (or enqueued on the compute stream) or published."""
        self._copying: dict[int, int] = {}
        """Layers that each load (by id) may copy in: parts of one cell can come from several."""
        self.low = 0
        self.running = False

    @property
    def committing(self) -> int:
        """Verified and being copied into the KV cache: too late to race."""
        mask = 0
        for layers in self._copying.values():
            mask |= layers
        return mask

    @property
    def complete(self) -> bool:
        return self.ready == self.full

    @property
    def loadable(self) -> int:
        """Layers that every chunk of the tile has, will have or can get."""
        mask = self.full
        for chunk in self.chunks:
            mask &= chunk.available
        return mask

    @property
    def in_flight(self) -> int:
        mask = 0
        for chunk in self.chunks:
            mask |= chunk.in_flight
        return mask & ~self.ready

    @property
    def must(self) -> int:
        """Compute has to pass layers ``[0, must)``: the highest one cannot be loaded."""
        return (self.full & ~(self.loadable | self.ready)).bit_length()

    @property
    def free(self) -> int:
        """Cells that nobody has begun."""
        return self.full & ~self.ready & ~self.in_flight

    def loads_for(self, channel: str) -> int:
        """Layers of the tile that ``channel`` could usefully be asked for now."""
        mask = 0
        for chunk in self.chunks:
            mask |= chunk.wanted_from(channel)
        floor = max(self.low, self.must)
        return mask & self.loadable & ~self.ready & ~((1 << floor) - 1)

    def chunks_for(self, channel: str, layer: int) -> tuple[int, ...]:
        """Absolute indices of the chunks that ``channel`` would deliver at ``layer``."""
        return tuple(
            self.first_chunk + i
            for i, chunk in enumerate(self.chunks)
            if chunk.wanted_from(channel) >> layer & 1
        )

    def claim(self, load: Load) -> None:
        """``load`` is on its way."""
        mask = bits(load.layers)
        for chunk in self._of(load.chunks):
            chunk.in_flight |= mask

    def commit(self, load: Load, layers: int) -> None:
        """``layers`` of ``load`` are being copied in from now on."""
        self._copying[load.id] = layers

    def landed(self, load: Load, layers: int) -> None:
        """``load`` ended with ``layers`` in place; cells become ready with their last chunk."""
        mask = bits(load.layers)
        for chunk in self._of(load.chunks):
            chunk.in_flight &= ~mask
            chunk.loaded |= layers
        everywhere = self.full
        for chunk in self.chunks:
            everywhere &= chunk.loaded
        self._copying.pop(load.id, None)
        self.ready |= everywhere & layers

    def lost(self, load: Load, chunks: Iterable[int]) -> None:
        """``load`` failed for ``chunks``: they need another source; the rest may be asked again."""
        mask = bits(load.layers)
        for chunk in self._of(load.chunks):
            chunk.in_flight &= ~mask
        for chunk in self._of(chunks):
            chunk.forget(load.channel, mask)
        self._copying.pop(load.id, None)

    def _of(self, chunks: Iterable[int]) -> list[ChunkState]:
        return [self.chunks[index - self.first_chunk] for index in chunks]

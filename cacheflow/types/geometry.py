"""Geometry of a KV cache and of the tile grid: pure numbers, no tensors.

Knows nothing about devices, files or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DTYPE_BYTES", "PAGE", "KVLayout", "Segment", "Span", "Tile", "TileGrid"]

PAGE: Final = 4096
"""Alignment of every layer block inside a stored chunk, in bytes (O_DIRECT's unit)."""

DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of integers ``[start, stop)``; empty when ``start == stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and self.start <= item < self.stop

    def covers(self, other: Span) -> bool:
        """Whether every element of ``other`` is in this span."""
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV cache, and the sizes of a stored chunk that follow from it.

    A chunk's payload is ordered ``[layer][k, v][head][token][dim]``; each layer block starts at a
    multiple of :data:`PAGE`. All sizes derive from the *storage* dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "chunk_tokens"):
            value = getattr(self, name)
            if not (isinstance(value, int) and 0 < value < 1 << 20):
                raise ValueError(f"KVLayout.{name} must be a positive integer, got {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"KVLayout.dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of one (layer, K or V, head) run of a chunk: the unit of a checksum."""
        return self.chunk_tokens * self.head_dim * self.itemsize

    def layer_bytes(self, heads: int | None = None) -> int:
        """Bytes of one layer of a chunk without padding, for ``heads`` KV heads (default all)."""
        return 2 * (self.num_kv_heads if heads is None else heads) * self.head_bytes

    def layer_stride(self, heads: int | None = None) -> int:
        """Bytes from one layer block to the next: :meth:`layer_bytes` rounded up to a page."""
        heads = self.num_kv_heads if heads is None else heads
        # Spelled out: every piece of every load asks, on the event loop.
        used = 2 * heads * self.chunk_tokens * self.head_dim * DTYPE_BYTES[self.dtype]
        return -(-used // PAGE) * PAGE

    def payload_bytes(self, layers: int | None = None, heads: int | None = None) -> int:
        """Bytes of the payload of one stored object holding ``layers`` layers of a chunk."""
        return (self.num_layers if layers is None else layers) * self.layer_stride(heads)


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Tokens ``[start, stop)`` computed by forward passes of ``width`` tokens each.

    One pass over a tile is ``width == stop - start``; decoding is ``width == 1``; 0 stands for a
    mix of copies, or copies of another grid. ``lossy``: some of it went through a lossy codec, so
    whatever was computed behind it is not exact either.
    """

    start: int
    stop: int
    width: int
    lossy: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """Tokens ``[start, stop)`` pushed through the layers in one forward pass."""

    index: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tile widths as a fixed function of position: ``head`` once each, then ``tail`` for ever.

    Fine where prefixes are short, wide where they are long. Because the grid depends on nothing
    but the position, recomputing a tile repeats the very same kernels and so the very same bits.
    """

    head: tuple[int, ...] = (512, 512, 1024)
    tail: int = 2048

    def __post_init__(self) -> None:
        if any(width <= 0 for width in (*self.head, self.tail)):
            raise ValueError("tile widths must be positive")

    @property
    def name(self) -> str:
        """How the grid is written in a ``grid_id``."""
        return "+".join(map(str, (*self.head, self.tail))) + "*"

    def check(self, chunk_tokens: int) -> None:
        """Raise ``ValueError`` unless every tile holds a whole number of chunks."""
        if any(width % chunk_tokens for width in (*self.head, self.tail)):
            raise ValueError(f"grid {self.name} is not a multiple of {chunk_tokens} tokens")

    def start(self, index: int) -> int:
        """First token of tile ``index``."""
        extra = index - len(self.head)
        return sum(self.head[:index]) + max(0, extra) * self.tail

    def tile(self, index: int) -> Tile:
        """Tile ``index`` at its full width."""
        return Tile(index, self.start(index), self.start(index + 1))

    def index_at(self, token: int) -> int:
        """Index of the tile that holds ``token``."""
        edge = 0
        for index, width in enumerate(self.head):
            edge += width
            if token < edge:
                return index
        return len(self.head) + (token - edge) // self.tail

    def split(self, start: int, stop: int) -> tuple[Tile, ...]:
        """``[start, stop)`` cut at tile edges; the first and last piece may be partial."""
        if start >= stop:
            return ()
        indices = range(self.index_at(start), self.index_at(stop - 1) + 1)
        edges = [start, *(self.start(i) for i in indices[1:]), stop]
        return tuple(Tile(i, a, b) for i, (a, b) in zip(indices, pairwise(edges), strict=True))

"""Identity and description of what is stored. Records only: formats live in ``cacheflow.kv``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from struct import unpack_from
from typing import TYPE_CHECKING, Final

from cacheflow.types.geometry import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types.geometry import KVLayout, Segment, Span

__all__ = [
    "MAC_BYTES",
    "NO_ID",
    "ChecksumKind",
    "ChunkInfo",
    "ChunkKey",
    "Codec",
    "ObjectKey",
    "ObjectKind",
]

NO_ID: Final = bytes(16)
"""In the place of a model or tenant id: the writer did not say."""
MAC_BYTES: Final = 16
"""Length of an authentication tag."""


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """Cryptographic digest (32 bytes) of everything that determines a chunk's KV values."""

    digest: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != 32:
            raise ValueError("a chunk key is 32 bytes")

    def __repr__(self) -> str:
        return f"ChunkKey({self.digest.hex()[:12]}...)"


class ObjectKind(StrEnum):
    """What an object holds."""

    KV = "kv"
    """Keys and values of one chunk."""
    HIDDEN = "hidden"
    """Boundary activation: hidden state of one chunk at the input of a layer."""


class ChecksumKind(StrEnum):
    """How each run of a payload is checksummed (64 bits either way)."""

    XXH3 = "xxh3"
    """XXH3-64: the fastest on a host."""
    WSUM = "wsum"
    """Odd-weighted sum of 32-bit words modulo 2**64: computable in torch on a device."""


class Codec(StrEnum):
    """How layer blocks are stored; each stands for itself, so any range of layers can be read."""

    RAW = "raw"
    """As they are."""
    ZSTD = "zstd"
    """Bytes of equal rank side by side, then zstd: lossless."""
    INT8 = "int8"
    """8-bit integers, a scale for each channel of a group of tokens: lossy."""
    FP8 = "fp8"
    """e4m3 floats, a scale for each (K/V, head): lossy."""

    @property
    def is_lossy(self) -> bool:
        """Whether what comes back differs from what was stored."""
        return self in (Codec.INT8, Codec.FP8)


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """One stored object: a shard of a chunk, named by absolute layer and KV-head ranges."""

    chunk: ChunkKey
    layers: Span
    heads: Span
    kind: ObjectKind = ObjectKind.KV

    def __hash__(self) -> int:
        # Every index asks for it, several times a load: a third of what dataclasses' own takes.
        return hash((self.chunk.digest, self.layers.start, self.heads.start))


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What a stored object says about itself: enough to read and verify any part of it.

    ``checksums`` holds little-endian u64s over the bytes *as stored*: of a raw object one per
    (layer, K/V, head) run in payload order, the last run of each layer covering the layer's padding
    too; of an encoded one, one per layer block, padding included.
    """

    key: ObjectKey
    layout: KVLayout
    grid_id: str
    segments: tuple[Segment, ...]
    canonical: bool
    """Computed on grid tiles from the first token on: recompute repeats it bit for bit."""
    checksum_kind: ChecksumKind
    layout_id: str
    checksums: bytes
    payload_offset: int
    """Bytes from the start of the object to its payload (prefix and table, padded to a page)."""
    nbytes: int
    """Bytes of the whole object."""
    model_id: bytes = NO_ID
    """16 bytes that name the model (:func:`cacheflow.kv.model_id`)."""
    tenant_id: bytes = NO_ID
    """16 bytes that name the tenant (:func:`cacheflow.kv.tenant_id`)."""
    lossy: bool = False
    """The values went through a lossy codec, here or in what they were computed from."""
    codec: Codec = Codec.RAW
    lengths: bytes = b""
    """Of an encoded object: one little-endian u64 per layer, the bytes of its block without the
    padding to the next page. A block as long as a raw one is a raw one."""
    macs: bytes = b""
    """One authentication tag per layer block, or none."""
    mac: bytes = b""
    """The tag of the header, the tags above included; empty without them."""

    def is_repeated(self, grid_id: str) -> bool:
        """Whether recompute under ``grid_id`` gives these bits."""
        return self.canonical and self.grid_id == grid_id

    def layer_offset(self, layer: int) -> int:
        """Byte offset inside the object of absolute ``layer``'s block."""
        if layer not in self.key.layers:
            raise ValueError(f"layer {layer} is not in {self.key.layers}")
        return self.payload_offset + self._stored(0, layer - self.key.layers.start)

    def layer_range(self, layers: Span) -> tuple[int, int]:
        """``(offset, length)`` in bytes of a range of absolute layers: one contiguous read of the
        bytes as stored."""
        key = self.key
        if not key.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all in {key.layers}")
        first, stop = layers.start - key.layers.start, layers.stop - key.layers.start
        if self.codec is Codec.RAW:  # the usual case: asked on the event loop, for every chunk
            stride = self.layout.layer_stride(key.heads.stop - key.heads.start)
            return self.payload_offset + first * stride, (stop - first) * stride
        return self.payload_offset + self._stored(0, first), self._stored(first, stop)

    def head_ranges(self, layer: int, heads: Span) -> list[tuple[int, int, int]]:
        """Where K and V of some absolute ``heads`` of one layer lie in a raw object: ``(offset,
        length, place)`` of each, in bytes; ``place`` is where it goes in a block of these heads.

        With the last head comes the padding that its checksum covers.
        """
        if self.codec is not Codec.RAW or not self.key.heads.covers(heads):
            raise ValueError(f"heads {heads} of {self.key!r} cannot be read alone")
        run, theirs = self.layout.head_bytes, len(self.key.heads)
        first = self.layer_offset(layer) + (heads.start - self.key.heads.start) * run
        padding = 0
        if heads.stop == self.key.heads.stop:
            padding = self.layout.layer_stride(theirs) - self.layout.layer_bytes(theirs)
        used = len(heads) * run
        return [(first, used, 0), (first + theirs * run, used + padding, used)]

    def block_sizes(self, layers: Span) -> list[int]:
        """Bytes from each layer's block to the next, padding included."""
        if self.codec is Codec.RAW:
            return [self.layout.layer_stride(len(self.key.heads))] * len(layers)
        return [-(-length // PAGE) * PAGE for length in self.block_lengths(layers)]

    def block_lengths(self, layers: Span) -> Sequence[int]:
        """Bytes of each layer's block as stored, without its padding."""
        if not self.key.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all in {self.key.layers}")
        if self.codec is Codec.RAW:
            return [self.layout.layer_bytes(len(self.key.heads))] * len(layers)
        first = layers.start - self.key.layers.start
        return unpack_from(f"<{len(layers)}Q", self.lengths, 8 * first)

    def _stored(self, first: int, stop: int) -> int:
        """Bytes of blocks ``[first, stop)``, counted from the object's first layer."""
        if self.codec is Codec.RAW:
            return (stop - first) * self.layout.layer_stride(len(self.key.heads))
        lengths = unpack_from(f"<{stop - first}Q", self.lengths, 8 * first)
        return PAGE * sum(-(-int(length) // PAGE) for length in lengths)

"""Identity and description of what is stored. Records only: formats live in ``cacheflow.kv``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.types.geometry import KVLayout, Segment, Span

__all__ = ["ChecksumKind", "ChunkInfo", "ChunkKey", "ObjectKey", "ObjectKind"]


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


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """One stored object: a shard of a chunk, named by absolute layer and KV-head ranges."""

    chunk: ChunkKey
    layers: Span
    heads: Span
    kind: ObjectKind = ObjectKind.KV


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What a stored object says about itself: enough to read and verify any part of it.

    ``checksums`` holds one little-endian u64 per (layer, K/V, head) run of the object, in payload
    order, the last run of each layer covering the layer's padding too.
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

    def layer_offset(self, layer: int) -> int:
        """Byte offset inside the object of absolute ``layer``'s block."""
        if layer not in self.key.layers:
            raise ValueError(f"layer {layer} is not in {self.key.layers}")
        stride = self.layout.layer_stride(len(self.key.heads))
        return self.payload_offset + (layer - self.key.layers.start) * stride

    def layer_range(self, layers: Span) -> tuple[int, int]:
        """``(offset, length)`` in bytes of a range of absolute layers: one contiguous read."""
        if not self.key.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all in {self.key.layers}")
        stride = self.layout.layer_stride(len(self.key.heads))
        offset = self.payload_offset + (layers.start - self.key.layers.start) * stride
        return offset, len(layers) * stride

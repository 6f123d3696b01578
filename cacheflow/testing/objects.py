"""Small stored objects, and the reads and writes of them, for tests of storage.

Builds real, sealed objects of a tiny model; knows no backend.
"""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.kv import checksum, decode_header, encode_header
from cacheflow.memory import buffer_from
from cacheflow.types import (
    ChecksumKind,
    ChunkInfo,
    ChunkKey,
    KVLayout,
    ObjectKey,
    Read,
    Segment,
    Span,
    Write,
)

if TYPE_CHECKING:
    from cacheflow.abc import StorageBackend
    from cacheflow.memory import InFlight
    from cacheflow.types import Buffer, TransferResult

__all__ = ["TINY", "StoredObject", "aligned_buffer", "load_one", "make_object", "object_key"]

TINY: Final = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=32)
"""8 KiB a layer with both heads, 4 KiB with one."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it is stored: ``data`` is ``header + payload``."""

    info: ChunkInfo
    header: bytes
    payload: bytes

    @property
    def key(self) -> ObjectKey:
        return self.info.key

    @property
    def data(self) -> bytes:
        return self.header + self.payload

    def write(self, *, hold: InFlight | None = None, split: int | None = None) -> Write:
        """A write of the object: header and payload page-aligned, or cut in two at ``split``."""
        if split is None:
            parts = (self.header, self.payload)
            return Write(self.info, tuple(aligned_buffer(part, hold) for part in parts))
        pieces = (self.data[:split], self.data[split:])
        return Write(self.info, tuple(buffer_from(piece, hold) for piece in pieces))


def object_key(number: int, layers: Span | None = None, heads: Span | None = None) -> ObjectKey:
    """Key of the shard of chunk ``number`` (default: all layers, all heads)."""
    chunk = ChunkKey(random.Random(number).randbytes(32))
    return ObjectKey(chunk, layers or Span(0, TINY.num_layers), heads or Span(0, TINY.num_kv_heads))


def make_object(
    number: int,
    version: int = 0,
    *,
    layers: Span | None = None,
    heads: Span | None = None,
    canonical: bool = True,
) -> StoredObject:
    """A valid object; another ``version`` has the same key and other bytes."""
    key = object_key(number, layers, heads)
    size = TINY.payload_bytes(len(key.layers), len(key.heads))
    payload = random.Random(f"{key}{version}").randbytes(size)
    info = ChunkInfo(
        key=key,
        layout=TINY,
        grid_id=f"conformance {version}",
        segments=(Segment(0, TINY.chunk_tokens, TINY.chunk_tokens),),
        canonical=canonical,
        checksum_kind=ChecksumKind.XXH3,
        layout_id="canonical",
        checksums=_checksums(payload),
        payload_offset=0,
        nbytes=0,
    )
    header = encode_header(info)
    return StoredObject(decode_header(header), header, payload)


def _checksums(payload: bytes) -> bytes:
    """The table, made right here: ``seal`` is for worker threads, tests run on event loops."""
    runs = range(0, len(payload), TINY.head_bytes)  # a tiny layer has no padding
    sums = (checksum(ChecksumKind.XXH3, memoryview(payload)[at:][: TINY.head_bytes]) for at in runs)
    return b"".join(each.to_bytes(8, "little") for each in sums)


def aligned_buffer(data: bytes | int, hold: InFlight | None = None) -> Buffer:
    """A page-aligned buffer that holds ``data``, or that many zeros."""
    size = data if isinstance(data, int) else len(data)
    memory = mmap.mmap(-1, max(1, size))
    if not isinstance(data, int):
        memory[:size] = data
    return buffer_from(memoryview(memory)[:size], hold)


async def load_one(
    backend: StorageBackend, key: ObjectKey, offset: int, nbytes: int
) -> tuple[TransferResult, bytes]:
    """Read one range into an aligned buffer; the bytes are those the result says were read."""
    buffer = aligned_buffer(nbytes)
    [result] = [each async for each in backend.load([Read(key, offset, buffer)])]
    assert buffer.view is not None
    return result, bytes(buffer.view[: result.nbytes])

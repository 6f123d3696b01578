"""Objects of any size in any backend, loads of them as fast as they come, and rows to compare."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheflow.kv import seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Read, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import Buffer, ChunkInfo

__all__ = ["DEPTH", "MIB", "SIZES", "Row", "fill", "layout_of", "load_all", "payloads"]

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB)
DEPTH = 4
"""Loads at a time."""


@dataclass(slots=True)
class Row:
    """One comparison: bytes a second of ours and of the reference, round by round."""

    name: str
    reference: str
    target: float | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        quartiles = statistics.quantiles(ratios, method="inclusive") if ratios[1:] else ratios * 3
        return {
            "name": self.name,
            "reference": self.reference,
            "bytes_per_second": statistics.median(self.ours),
            "reference_bytes_per_second": statistics.median(self.theirs),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ratio_quartiles": [quartiles[0], quartiles[-1]],
            "target": self.target,
            "rounds": len(ratios),
        }


def layout_of(size: int) -> KVLayout:
    """One layer of exactly ``size`` bytes (a multiple of 256 KiB)."""
    return KVLayout(1, size // (2 * 256 * 128 * 4), 128, "float32")


async def fill(backend: StorageBackend, size: int, count: int) -> list[ChunkInfo]:
    """Store ``count`` objects with ``size`` bytes of payload."""
    layout, infos = layout_of(size), []
    payload = bytearray(random.Random(size).randbytes(size))
    for number in range(count):
        payload[:8] = number.to_bytes(8, "little")
        chunk = ChunkKey(random.Random(f"{size} {number}").randbytes(32))
        key = ObjectKey(chunk, Span(0, 1), Span(0, layout.num_kv_heads))
        info, header = seal(
            key, layout, memoryview(payload), grid_id="bench", segments=(), canonical=True
        )
        parts = (buffer_from(header), buffer_from(payload))
        [result] = await backend.store([Write(info, parts)])
        assert result.status is TransferStatus.OK, result
        infos.append(info)
    return infos


async def load_all(
    backend: StorageBackend,
    ranges: Sequence[tuple[ChunkInfo, int, int]],
    depth: int,
    batch: int = 1,
    then: Callable[[ChunkInfo, memoryview], None] | None = None,
) -> float:
    """Bytes a second of reading ``ranges`` (info, offset, bytes), ``batch`` of them in each of
    ``depth`` loads at a time (a restore reads the chunks of a tile in one load), over and over into
    the same memory, as what they are compared with does. ``then`` runs on a thread with what has
    arrived, before its load counts as ended."""
    room = max(nbytes for _, _, nbytes in ranges)
    pool = StagingPool(depth * batch * room)
    loop, verifiers = asyncio.get_running_loop(), ThreadPoolExecutor(2)
    batches = iter([ranges[at : at + batch] for at in range(0, len(ranges), batch)])

    async def worker() -> None:
        with await pool.lease(batch * room) as lease:
            for some in batches:
                buffers = [lease.part(at * room, item[2]) for at, item in enumerate(some)]
                reads = [
                    Read(info.key, offset, buffer)
                    for (info, offset, _), buffer in zip(some, buffers, strict=True)
                ]
                async for result in backend.load(reads):
                    assert result.status is TransferStatus.OK, result
                if then is not None:
                    await loop.run_in_executor(verifiers, each, then, some, buffers)

    pool.view[:] = bytes(len(pool.view))  # touch it: page faults are not what is measured
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(depth):
            group.create_task(worker())
    seconds = time.perf_counter() - start
    verifiers.shutdown()
    await pool.aclose()
    return sum(nbytes for _, _, nbytes in ranges) / seconds


def each(
    then: Callable[[ChunkInfo, memoryview], None],
    some: Sequence[tuple[ChunkInfo, int, int]],
    buffers: Sequence[Buffer],
) -> None:
    """``then`` for each of a batch."""
    for (info, _, _), buffer in zip(some, buffers, strict=True):
        assert buffer.view is not None
        then(info, buffer.view)


def payloads(infos: Sequence[ChunkInfo]) -> list[tuple[ChunkInfo, int, int]]:
    """The whole payload of each object, as a range."""
    return [(info, info.payload_offset, info.nbytes - info.payload_offset) for info in infos]

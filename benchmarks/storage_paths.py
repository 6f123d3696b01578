"""The way of stored bytes from a memory tier into KV memory, as the restorer goes it.

Backend, guard and tier as a session opens them; the restorer's own fetching and verifying; then the
copy that an engine makes, on threads. What is lent is copied once; ``Copying`` is the same store
when it does not lend: into staging memory first, then on.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from cacheflow.memory import StagingPool
from cacheflow.restore.fetching import fetched
from cacheflow.restore.transfer import verify_pieces
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.tiers import Guarded, Located
from cacheflow.tiers.tier import Tier
from cacheflow.types import Load, Shard, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.restore.transfer import Piece
    from cacheflow.types import ChunkInfo, Extent, Loan

__all__ = ["Copying", "into_memory", "tier_over"]


class Copying(DramBackend):
    """Lends nothing."""

    def borrow(self, extents: Sequence[Extent]) -> Loan | None:  # type: ignore[override]
        return None


async def tier_over(backend: StorageBackend) -> Tier:
    """``backend`` as sessions have it; closing it closes the backend."""
    settings = TierSettings(name="dram", backend="dram")
    return await Tier.over(Guarded(backend, "dram"), settings)


async def into_memory(
    tier: StorageBackend,
    infos: Sequence[ChunkInfo],
    target: StagingPool,
    *,
    depth: int,
    batch: int,
    threads: int,
    verify: bool,
) -> float:
    """Bytes a second of fetching the payloads of ``infos``, ``batch`` in each of ``depth`` loads at
    a time, and copying them into ``target``, over and over, on ``threads``."""
    shard = Shard.of(infos[0].layout)
    located = Located("dram", tuple((info,) for info in infos), shard)
    size = infos[0].layer_range(Span(0, 1))[1]
    groups = [range(at, min(at + batch, len(infos))) for at in range(0, len(infos), batch)]
    loads = iter(
        [
            Load(number, "bench", "dram", 0, Span(0, 1), tuple(group), len(group) * size)
            for number, group in enumerate(groups)
        ]
    )
    pool, loop = StagingPool(depth * batch * size), asyncio.get_running_loop()
    pool.view[:] = bytes(len(pool.view))  # touch it: page faults are not what is measured
    with ThreadPoolExecutor(2) as verifiers, ThreadPoolExecutor(threads) as copiers:

        async def worker(to: int) -> None:
            for load in loads:
                async with fetched(tier, load, located, pool) as pieces:
                    if verify:
                        await loop.run_in_executor(verifiers, verify_pieces, pieces)
                    await loop.run_in_executor(copiers, _copy, pieces, to)

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for slot in range(depth):
                group.create_task(worker(target.address + slot * batch * size))
        seconds = time.perf_counter() - start
    await pool.aclose()
    return len(infos) * size / seconds


def _copy(pieces: Sequence[Piece], to: int) -> None:
    """As an engine does: on a thread of its own, with the interpreter's lock released."""
    for piece in pieces:
        source = np.frombuffer(piece.view, dtype=np.uint8).ctypes.data
        ctypes.memmove(to, source, len(piece.view))
        to += len(piece.view)

"""A dram tier against memcpy: the whole way of its bytes into KV memory, and its loads alone.

The way is the restorer's own: backend, guard and tier as a session opens them, its fetching and
verifying, then the copy that an engine makes, on one thread. What is lent is copied once;
``Copying`` is the same store when it does not lend: into staging memory first, then on.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from storage_reading import DEPTH, MIB, SIZES, Row, fill, load_all, payloads
from storage_reference import memcpy

from cacheflow.kv import verify
from cacheflow.memory import StagingPool
from cacheflow.restore.fetching import fetched
from cacheflow.restore.transfer import verify_pieces
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.tiers import Guarded, Located
from cacheflow.tiers.tier import Tier
from cacheflow.types import Load, Shard, Span

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.restore.transfer import Piece
    from cacheflow.types import ChunkInfo, Extent, Loan

__all__ = ["bench_dram"]

Ways: TypeAlias = "dict[str, tuple[Row | None, Callable[[], Awaitable[float]]]]"
"""By name: its row (None: it is only a reference), and one round, in bytes a second."""


async def bench_dram(options: argparse.Namespace, tick: Callable[[], None]) -> list[Row]:
    """Against copying as much on as many threads: what lies in the tier into KV memory, as the
    restorer brings it there, lent and staged; and the backend's loads alone."""
    rows = []
    for size in SIZES:
        count = options.mib * MIB // size
        infos, tiers = await dram_tiers(size, count, options.copy_threads)
        source = StagingPool(count * size)
        target = StagingPool(DEPTH * options.batch * size)
        for pool in (source, target):
            pool.view[:] = bytes(len(pool.view))
        ways = dram_ways(size, options, infos, tiers, target)
        for threads in {1, options.copy_threads}:
            copy = partial(asyncio.to_thread, memcpy, source, target, size, count, threads)
            ways[f"memcpy x{threads}"] = (None, copy)
        for number in range(options.rounds):
            order = random.Random(number).sample(list(ways), len(ways))
            speeds = {name: await ways[name][1]() for name in order}
            for name, (row, _) in ways.items():
                if row is not None:
                    row.ours.append(speeds[name])
                    row.theirs.append(speeds[row.reference])
            tick()
        for tier in tiers.values():
            await tier.aclose()
        await asyncio.gather(source.aclose(), target.aclose())
        rows += [row for row, _ in ways.values() if row is not None]
    return rows


async def dram_tiers(
    size: int, count: int, threads: int
) -> tuple[dict[str, list[ChunkInfo]], dict[str, Tier]]:
    """A tier that lends and one that copies, each with ``count`` objects, and these objects."""
    infos, tiers = {}, {}
    for name, kind in (("lent", DramBackend), ("staged", Copying)):
        options = {"capacity_bytes": count * (size + 4096), "threads": threads}
        tiers[name] = await tier_over(await kind.open(options))
        infos[name] = await fill(tiers[name], size, count)
    return infos, tiers


def dram_ways(
    size: int,
    options: argparse.Namespace,
    infos: dict[str, list[ChunkInfo]],
    tiers: dict[str, Tier],
    target: StagingPool,
) -> Ways:
    """What is measured."""
    ways: Ways = {}
    for verified in (False, True):
        also = ", verified" if verified else ""
        for name, tier in tiers.items():
            goal = 0.85 if name == "lent" and not verified else None
            row = Row(f"dram into KV, {size // MIB} MiB, {name}{also}", "memcpy x1", goal)
            once = partial(
                into_memory,
                tier,
                infos[name],
                target,
                depth=DEPTH,
                batch=options.batch,
                threads=1,
                verify=verified,
            )
            ways[row.name] = (row, once)
        reference, goal = f"memcpy x{options.copy_threads}", None if verified else 0.85
        row = Row(f"dram load, {size // MIB} MiB{also}", reference, goal)
        backend = innermost(tiers["staged"])
        then = check if verified else None
        ranges = payloads(infos["staged"])
        ways[row.name] = (row, partial(load_all, backend, ranges, DEPTH, options.batch, then))
    return ways


def innermost(tier: Tier) -> StorageBackend:
    """The backend behind the guard."""
    assert isinstance(tier.inner, Guarded)
    return tier.inner.inner


def check(info: ChunkInfo, data: memoryview) -> None:
    """What a verifier does with one payload."""
    verify(info, info.key.layers, data)


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

"""A dram tier against memcpy: the whole way of its bytes into KV memory, and its loads alone.

The way is the restorer's own: backend, guard and tier as a session opens them, its fetching and
verifying, then the transformers engine's publishing into its pages, on its one copy thread. What is
lent is copied once; ``Copying`` is the same store when it does not lend: into staging memory first,
then on. memcpy copies as much, on one thread, from memory as cold into as much memory.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from storage_reading import DEPTH, MIB, SIZES, Row, fill, layout_of, load_all, payloads
from storage_reference import memcpy
from transformers import LlamaConfig, LlamaForCausalLM

from cacheflow.kv import verify
from cacheflow.memory import StagingPool
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.restore.fetching import fetched
from cacheflow.restore.transfer import published_parts, verify_pieces
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.tiers import Guarded, Located
from cacheflow.tiers.tier import Tier
from cacheflow.types import Load, Shard, Span, StagedPart

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo, Extent, KVLayout, Loan

__all__ = ["bench_dram"]

REQUEST = "bench"

Ways: TypeAlias = "dict[str, tuple[Row | None, Callable[[], Awaitable[float]]]]"
"""By name: its row (None: it is only a reference), and one round, in bytes a second."""


async def bench_dram(options: argparse.Namespace, tick: Callable[[], None]) -> list[Row]:
    """Against copying as much on as many threads: what lies in the tier into KV memory, as the
    restorer brings it there, lent and staged; and the backend's loads alone."""
    rows = []
    for size in SIZES:
        async with engine_of(layout_of(size), DEPTH * options.batch) as engine:
            rows += await bench_size(size, options, engine, tick)
    return rows


async def bench_size(
    size: int, options: argparse.Namespace, engine: TransformersEngine, tick: Callable[[], None]
) -> list[Row]:
    """With payloads of ``size`` bytes."""
    count = options.mib * MIB // size
    infos, tiers = await dram_tiers(size, count, options.copy_threads)
    source = StagingPool(count * size)
    target = StagingPool(DEPTH * options.batch * size)
    for pool in (source, target):
        pool.view[:] = bytes(len(pool.view))
    ways = dram_ways(size, options, infos, tiers, engine)
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
    return [row for row, _ in ways.values() if row is not None]


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
    engine: TransformersEngine,
) -> Ways:
    """What is measured."""
    ways: Ways = {}
    for verified in (False, True):
        also = ", verified" if verified else ""
        for name, tier in tiers.items():
            goal = 0.85 if name == "lent" and not verified else None
            row = Row(f"dram into KV, {size // MIB} MiB, {name}{also}", "memcpy x1", goal)
            once = partial(into_pages, tier, infos[name], engine, options.batch, verify=verified)
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


async def into_pages(
    tier: StorageBackend,
    infos: Sequence[ChunkInfo],
    engine: TransformersEngine,
    batch: int,
    *,
    verify: bool,
) -> float:
    """Bytes a second of fetching the payloads of ``infos``, ``batch`` in each of a few loads at a
    time, and publishing them into the pages of ``engine``, over and over, as a restore does."""
    located = Located("dram", tuple((info,) for info in infos), Shard.of(engine.layout))
    size = infos[0].layer_range(Span(0, 1))[1]
    groups = [range(at, min(at + batch, len(infos))) for at in range(0, len(infos), batch)]
    loads = iter(
        [
            Load(number, REQUEST, "dram", 0, Span(0, 1), tuple(group), len(group) * size)
            for number, group in enumerate(groups)
        ]
    )
    pool, loop = StagingPool(DEPTH * batch * size), asyncio.get_running_loop()
    pool.view[:] = bytes(len(pool.view))  # touch it: page faults are not what is measured
    with ThreadPoolExecutor(2) as verifiers:
        await asyncio.gather(*(loop.run_in_executor(verifiers, time.sleep, 0.0) for _ in range(2)))

        async def worker(first: int) -> None:
            for load in loads:
                async with fetched(tier, load, located, pool) as pieces:
                    if verify:
                        await loop.run_in_executor(verifiers, verify_pieces, pieces)
                    parts = published_parts(pieces, 1)
                    await engine.publish(REQUEST, _placed(parts, first))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for slot in range(DEPTH):
                group.create_task(worker(slot * batch))
        seconds = time.perf_counter() - start
    await pool.aclose()
    return len(infos) * size / seconds


def _placed(parts: Sequence[StagedPart], first: int) -> list[StagedPart]:
    """In the request's chunks from ``first`` on: it has fewer than there are objects."""
    return [StagedPart(at, p.layers, p.view, p.heads) for at, p in enumerate(parts, first)]


@asynccontextmanager
async def engine_of(layout: KVLayout, chunks: int) -> AsyncIterator[TransformersEngine]:
    """A real engine whose KV has the shape of ``layout``, with a request of ``chunks`` chunks open
    and its pages touched."""
    with tempfile.TemporaryDirectory() as folder:
        await asyncio.to_thread(save_model, folder, layout, chunks)
        engine = await TransformersEngine.open_model(folder, dtype=layout.dtype)
    try:
        tokens = chunks * layout.chunk_tokens
        await engine.open(REQUEST, [1] * (tokens + 1))
        zeros = memoryview(bytearray(layout.payload_bytes()))
        for chunk in range(chunks):
            await engine.publish(REQUEST, [StagedPart(chunk, Span(0, 1), zeros, None)])
        yield engine
    finally:
        await engine.aclose()


def save_model(folder: str, layout: KVLayout, chunks: int) -> None:
    """Random weights, next to none."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layout.num_layers,
        num_attention_heads=layout.num_kv_heads,
        num_key_value_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=64,
        max_position_embeddings=(chunks + 1) * layout.chunk_tokens,
    )
    LlamaForCausalLM(config).save_pretrained(folder)

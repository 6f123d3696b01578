"""Fast mode from the settings to the store: prompts share passes, what is stored says so, and only
those who allow it ever read it."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.errors import ConfigError
from cacheflow.kv import decode_header, is_packed
from cacheflow.plugins.pipeline import PipelineEngine
from cacheflow.plugins.tensor_parallel import TensorParallelEngine
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from cacheflow.types import ChunkInfo, ComputeBatch, ComputeDone

CHUNK = 64
TOKENS = 5 * CHUNK + 20
FAST: dict[str, Any] = {"mode": "fast", "allow_lossy": True}


@asynccontextmanager
async def engine_of(folder: Path, *, fast: bool) -> AsyncIterator[Any]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", chunk_tokens=CHUNK, kv_bytes=1 << 28, fast=fast
    )
    try:
        yield engine
    finally:
        await engine.aclose()


def settings_of(folder: Path, **others: Any) -> Settings:
    options = {"path": str(folder), "create": True}
    tier = {"name": "disk", "backend": "nvme", "options": options}
    return Settings(tiers=[tier], staging_bytes=1 << 24, keep_costs=False, **others)


def prompt_of(seed: int, length: int = TOKENS) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


def stored_in(folder: Path) -> list[ChunkInfo]:
    return [decode_header(path.read_bytes()) for path in folder.rglob("*.kv.*")]


def watch(engine: Any, passes: list[tuple[str, ...]]) -> None:
    """Note whose tiles every pass had."""
    recompute = engine.recompute

    async def watched(batch: ComputeBatch, claim: Any) -> list[ComputeDone]:
        passes.append(tuple(work.request_id for work in batch.work))
        done: list[ComputeDone] = await recompute(batch, claim)
        return done

    engine.recompute = watched


async def talk(flow: CacheFlow, engine: Any, seeds: Sequence[int], policy: str) -> list[Any]:
    """A prompt a session, all at once: tokens, restoration and KV of each."""

    async def one(seed: int) -> Any:
        session, report = flow.session(f"s{seed}"), Generation()
        stream = session.generate(prompt_of(seed), max_new_tokens=4, policy=policy, report=report)
        tokens = [token async for token in stream]
        assert report.restoration is not None
        kv = engine.kv(session.requests[0], 1, 5 * CHUNK)
        return tokens, report.restoration, kv

    return await asyncio.gather(*(one(seed) for seed in seeds))


async def test_from_the_setting_to_the_store_and_back(model_folder: Path, tmp_path: Path) -> None:
    """Four prompts at once share passes. Their chunks are stored as not exact, and one who allows
    that restores from them; an exact flow on the same folder does not see them, computes every
    tile by itself, stores its own copies in their place, and gives the same tokens."""
    passes: list[tuple[str, ...]] = []
    seeds = range(4)
    async with engine_of(model_folder, fast=True) as engine:
        watch(engine, passes)
        async with CacheFlow.open(settings_of(tmp_path, **FAST), engine=engine) as flow:
            cold = await talk(flow, engine, seeds, "recompute")
        assert max(len(set(names)) for names in passes) > 1
        infos = stored_in(tmp_path)
        assert len(infos) == 20
        assert all(i.lossy and not i.canonical and is_packed(i.grid_id) for i in infos)
        async with CacheFlow.open(settings_of(tmp_path, **FAST), engine=engine) as flow:
            warm = await talk(flow, engine, seeds, "load")
        assert all(restoration.recomputed_cells == 0 for _, restoration, _ in warm)
    passes.clear()
    async with engine_of(model_folder, fast=False) as engine:
        watch(engine, passes)
        async with CacheFlow.open(settings_of(tmp_path), engine=engine) as flow:
            exact = await talk(flow, engine, seeds, "load")
        assert all(restoration.stored_tokens == 0 for _, restoration, _ in exact)
        assert all(len(names) == 1 for names in passes)
        infos = stored_in(tmp_path)
        assert sum(not i.lossy and not is_packed(i.grid_id) for i in infos) == 20
        async with CacheFlow.open(settings_of(tmp_path), engine=engine) as flow:
            again = await talk(flow, engine, seeds, "load")
        assert all(restoration.recomputed_cells == 0 for _, restoration, _ in again)
    for results in zip(cold, warm, exact, again, strict=True):
        assert len({tuple(tokens) for tokens, _, _ in results}) == 1
        (_, _, fast_kv), *_, (_, _, exact_kv) = results
        for ours, theirs in zip(fast_kv, exact_kv, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))


async def test_the_two_ends_meet_in_fast_mode(model_folder: Path, tmp_path: Path) -> None:
    """Restores by loads and passes together, of exact chunks: the same tokens, whoever decides."""
    async with (
        engine_of(model_folder, fast=False) as engine,
        CacheFlow.open(settings_of(tmp_path), engine=engine) as flow,
    ):
        cold = await talk(flow, engine, range(3), "recompute")
    async with engine_of(model_folder, fast=True) as engine:
        for policy in ("adaptive", "staircase", "cake"):
            async with CacheFlow.open(settings_of(tmp_path, **FAST), engine=engine) as flow:
                warm = await talk(flow, engine, range(3), policy)
            assert [tokens for tokens, *_ in warm] == [tokens for tokens, *_ in cold]
            for _, restoration, _ in warm:
                loaded = sum(restoration.loaded_cells.values())
                whole = restoration.prefix_tokens * engine.layout.num_layers
                assert restoration.recomputed_cells + loaded == whole > 0


async def test_setting_and_engine_have_to_agree(model_folder: Path, tmp_path: Path) -> None:
    """Either one alone is refused, saying what to do; and so is fast without allow_lossy."""
    async with engine_of(model_folder, fast=True) as engine:
        with pytest.raises(ConfigError, match="set mode to fast and allow_lossy to true"):
            async with CacheFlow.open(settings_of(tmp_path), engine=engine):
                pass
    async with engine_of(model_folder, fast=False) as engine:
        with pytest.raises(ConfigError, match="open the engine with fast=True"):
            async with CacheFlow.open(settings_of(tmp_path, **FAST), engine=engine):
                pass
    with pytest.raises(ConfigError, match="mode is fast"):
        Settings(mode="fast")
    for kind in (PipelineEngine, TensorParallelEngine):
        with pytest.raises(ConfigError, match="exact mode only"):
            await kind.open_model(model_folder, device="cpu", fast=True)

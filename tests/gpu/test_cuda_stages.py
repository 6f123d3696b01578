"""Two stages as two processes on one device: what a single process computes, bit for bit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.testing.processes import run_ranks
from cacheflow.testing.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.processes import Seat

PROMPT = [(7 * i + i // 11) % 300 + 3 for i in range(137)]
PREFIX, CHUNK, NEW = 128, 16, 4


def options(device: str) -> dict[str, Any]:
    from cacheflow.types import TileGrid

    sizes = {"chunk_tokens": CHUNK, "kv_bytes": 1 << 26}
    return {"dtype": "float32", "device": device, "grid": TileGrid((32, 32), 64), **sizes}


async def turns(engine: Any, policies: list[str]) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and K and V of the layers that are here, of one turn a policy; each is forgotten."""
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings
    from cacheflow.testing.storage import MemoryBackend

    made = []
    settings = Settings(staging_bytes=1 << 24, keep_costs=False)
    async with CacheFlow.open(settings, engine=engine, backends={"m": MemoryBackend()}) as flow:
        for policy in policies:
            session = flow.session("a").generate(PROMPT, max_new_tokens=NEW, policy=policy)
            tokens = [token async for token in session]
            (name,) = engine.open_requests
            layers = range(engine.layout.num_layers)
            kv = [engine.kv(name, layer, PREFIX) for layer in layers]
            made.append((tokens, [part.cpu().tolist() for pair in kv for part in pair]))
            await flow.flush()
            await flow.forget()
    return made


async def rank_restores(seat: Seat, folder: str, device: str) -> list[tuple[list[int], list[Any]]]:
    from cacheflow.plugins.pipeline import PipelineEngine

    where = {"rank": seat.rank, "ranks": seat.count, "init_method": seat.init_method}
    engine = await PipelineEngine.open_model(folder, **{**options(device), **where})
    try:
        return await turns(engine, ["recompute", "load", "recompute", "adaptive"])
    finally:
        await engine.aclose()


async def alone(folder: Path, device: str) -> tuple[list[int], list[Any]]:
    from cacheflow.plugins.transformers import TransformersEngine

    engine = await TransformersEngine.open_model(folder, **options(device))
    try:
        return (await turns(engine, ["recompute"]))[0]
    finally:
        await engine.aclose()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_stages_on_one_device_are_bit_exact(tmp_path: Path, device: str) -> None:
    """Cold, loaded, from activations, and both at once: on each rank the single process's KV in its
    own layers, and its tokens."""
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("CUDA: no device here")
    folder = save_tiny_llama(tmp_path / "model", num_key_value_heads=6)
    tokens, kv = asyncio.run(alone(folder, device))
    halves = kv[: len(kv) // 2], kv[len(kv) // 2 :]
    ranks = run_ranks(2, rank_restores, str(folder), device, deadline=100.0)
    for rank, half in zip(ranks, halves, strict=True):
        assert len(rank) == 4
        for found, parts in rank:
            assert found == tokens
            assert parts == half

"""Two stages as two processes, on one device or one each: what a single process computes."""

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


async def rank_restores(
    seat: Seat, folder: str, devices: list[str], backend: str
) -> list[tuple[list[int], list[Any]]]:
    from cacheflow.plugins.pipeline import PipelineEngine

    where = {"rank": seat.rank, "ranks": seat.count, "init_method": seat.init_method}
    mine = options(devices[seat.rank])
    engine = await PipelineEngine.open_model(folder, **{**mine, **where})
    try:
        carriers = engine._meeting.carriers
        carrier = carriers.before or carriers.behind
        assert carrier is not None, "there are two stages"
        assert carrier.backend == backend
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


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["cpu", "cpu"], "gloo"),
        (["cuda:0", "cuda:0"], "gloo"),
        (["cuda:0", "cuda:1"], "nccl"),
    ],
)
def test_stages_are_bit_exact(tmp_path: Path, devices: list[str], backend: str) -> None:
    """Cold, loaded, from activations, and both at once: on each rank the single process's KV in its
    own layers, and its tokens. NCCL carries where each rank has a device of its own."""
    needed = len({device for device in devices if device != "cpu"})
    if torch.cuda.device_count() < needed:
        pytest.skip(f"CUDA: it takes {needed} devices")
    folder = save_tiny_llama(tmp_path / "model", num_key_value_heads=6)
    tokens, kv = asyncio.run(alone(folder, devices[0]))
    halves = kv[: len(kv) // 2], kv[len(kv) // 2 :]
    ranks = run_ranks(2, rank_restores, str(folder), devices, backend, deadline=100.0)
    for rank, half in zip(ranks, halves, strict=True):
        assert len(rank) == 4
        for found, parts in rank:
            assert found == tokens
            assert parts == half

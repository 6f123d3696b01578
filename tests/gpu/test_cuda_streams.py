"""What the profiler sees: no wait inside a tile, and loads on a stream that is not compute's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.testing.tiny_model import save_tiny_llama
from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

if not torch.cuda.is_available():
    pytest.skip("CUDA: no device here", allow_module_level=True)

CHUNK = 16
WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy"}
"""Calls that wait for all there is. ``cudaEventSynchronize`` is a mark, and is meant."""


async def engine_of(folder: Path) -> TransformersEngine:
    save_tiny_llama(folder, hidden_size=256, num_attention_heads=4, head_dim=64)
    return await TransformersEngine.open_model(
        folder, device="cuda", dtype="bfloat16", grid=TileGrid((64,), 64), chunk_tokens=CHUNK
    )


async def traced(work: Callable[[], Awaitable[object]], folder: Path) -> list[dict[str, Any]]:
    """Everything that happened on the host and on the device meanwhile."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        await work()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def streams(events: list[dict[str, Any]], *kinds: str) -> set[int]:
    return {event["args"]["stream"] for event in events if event.get("cat") in kinds}


async def test_the_profiler_sees_no_wait_inside_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a tile's first and last call the host waits for marks and for nothing else."""
    from cacheflow.plugins.transformers.walk import Walker

    tile = Walker.tile

    def named(*args: Any) -> Any:
        with torch.profiler.record_function("a tile"):
            return tile(*args)

    monkeypatch.setattr(Walker, "tile", named)
    engine = await engine_of(tmp_path)
    await engine.open("a", list(range(3, 131)))
    first, second = engine.grid.split(0, 128)
    await engine.recompute(ComputeBatch((TileWork("a", first, 0),)), lambda _w, _l: Claim.WRITE)
    batch = ComputeBatch((TileWork("a", second, 0),))
    events = await traced(lambda: engine.recompute(batch, lambda _w, _l: Claim.WRITE), tmp_path)
    (span,) = [event for event in events if event["name"] == "a tile" and "tid" in event][:1]
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cuda_runtime"
        and span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
    ]
    assert any("Launch" in name for name in inside), "the tile was seen"
    assert not WAITS.intersection(inside), sorted(set(inside))
    await engine.aclose()


async def test_loads_do_not_queue_behind_compute(tmp_path: Path) -> None:
    """What publishes a load runs on a stream that no kernel of a tile is on, out of pinned memory
    in one copy a chunk."""
    engine = await engine_of(tmp_path)
    await engine.open("a", list(range(3, 131)))
    (first, _) = engine.grid.split(0, 128)
    batch = ComputeBatch((TileWork("a", first, 0),))
    computed = await traced(lambda: engine.recompute(batch, lambda _w, _l: Claim.WRITE), tmp_path)
    size = engine.layout.num_layers * engine.layout.layer_stride()
    parts = []
    for chunk in range(4):
        host: Any = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
        parts.append(StagedPart(chunk, Span(0, engine.layout.num_layers), memoryview(host)))
    published = await traced(lambda: engine.publish("a", parts), tmp_path)
    copies = [event["name"] for event in published if event.get("cat") == "gpu_memcpy"]
    assert len(copies) == len(parts), copies
    assert all("Pinned" in name for name in copies), copies
    moving = streams(published, "gpu_memcpy", "kernel")
    assert not moving & streams(computed, "kernel")
    await engine.aclose()

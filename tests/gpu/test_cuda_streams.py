"""What the profiler sees: no wait inside a tile, and loads on a stream that is not compute's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.plugins.transformers.walk import Walker
from cacheflow.testing.tiny_model import save_tiny_llama
from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, TileGrid, TileWork

if TYPE_CHECKING:
    from pathlib import Path

CUDA = torch.cuda.is_available()
ACTIVITIES = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
CHUNK, TILE = 16, 64
PROMPT = list(range(3, 140))
"""Two tiles and a few tokens: the last tile would fetch logits, which is a wait, and is meant."""
WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy"}
"""Calls that wait for all there is. ``cudaEventSynchronize`` waits for a mark, and is meant."""

pytestmark = pytest.mark.allow_blocking  # traces are files


async def engine_of(folder: Path, device: str) -> TransformersEngine:
    save_tiny_llama(folder, hidden_size=256, num_attention_heads=4, head_dim=64)
    grid = TileGrid((TILE,), TILE)
    dtype = "float32" if device == "cpu" else "bfloat16"
    return await TransformersEngine.open_model(
        folder, device=device, dtype=dtype, grid=grid, chunk_tokens=CHUNK
    )


def events_of(seen: profile, folder: Path) -> list[dict[str, Any]]:
    """Everything that happened on the host and on the device meanwhile, with a duration."""
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def streams(events: list[dict[str, Any]], *kinds: str) -> set[int]:
    return {event["args"]["stream"] for event in events if event.get("cat") in kinds}


async def traced_tile(
    engine: TransformersEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """The second tile of a prompt, profiled by the compute thread itself: by default the profiler
    sees calls of the thread that started it only."""
    tile, profiles = Walker.tile, list[profile]()

    def watched(*args: Any) -> Any:
        with profile(activities=ACTIVITIES) as seen, record_function("a tile"):
            done = tile(*args)
        profiles.append(seen)
        return done

    await engine.open("a", PROMPT)
    await engine.prefill("a", 0, TILE)
    monkeypatch.setattr(Walker, "tile", watched)
    work = TileWork("a", engine.grid.split(0, 2 * TILE)[1], 0)
    await engine.recompute(ComputeBatch((work,)), lambda _work, _layer: Claim.WRITE)
    monkeypatch.setattr(Walker, "tile", tile)
    (seen,) = profiles
    return events_of(seen, folder)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_the_profiler_sees_no_wait_inside_a_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Between a tile's first and last call the host waits for marks and for nothing else. (On a CPU
    there is nothing to wait for, but the same calls are seen.)"""
    if device == "cuda" and not CUDA:
        pytest.skip("CUDA: no device here")
    engine = await engine_of(tmp_path, device)
    events = await traced_tile(engine, tmp_path, monkeypatch)
    (span,) = [e for e in events if e["name"] == "a tile" and e.get("cat") == "user_annotation"]
    inside = [e for e in events if span["ts"] <= e["ts"] <= span["ts"] + span["dur"]]
    products = [e for e in inside if e["name"] == "aten::linear"]
    assert len(products) == 7 * engine.layout.num_layers
    if device == "cuda":
        called = {e["name"] for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")}
        assert any("Launch" in name for name in called), called
        assert not WAITS & called, called
    await engine.aclose()


async def test_loads_do_not_queue_behind_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What publishes a load runs on a stream that no kernel of a tile is on, out of pinned memory
    in one copy a chunk."""
    if not CUDA:
        pytest.skip("CUDA: no device here")
    engine = await engine_of(tmp_path, "cuda")
    computed = await traced_tile(engine, tmp_path, monkeypatch)
    layers = Span(0, engine.layout.num_layers)
    parts = []
    for chunk in range(TILE // CHUNK):
        size = len(layers) * engine.layout.layer_stride()
        host: Any = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
        parts.append(StagedPart(chunk, layers, memoryview(host)))
    with profile(activities=ACTIVITIES) as seen:
        await engine.publish("a", parts)
    published = events_of(seen, tmp_path)
    copies = [event["name"] for event in published if event.get("cat") == "gpu_memcpy"]
    assert len(copies) == len(parts), copies
    assert all("Pinned" in name for name in copies), copies
    assert not streams(published, "gpu_memcpy", "kernel") & streams(computed, "kernel")
    await engine.aclose()

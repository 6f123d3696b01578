"""With many restores at once, what the series say is what happened: nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from cacheflow.metrics import PrometheusObserver
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.types import FirstToken, LoadEnded, LoadOutcome, TileGrid

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import Event


def _prompt(number: int) -> list[int]:
    """Each of another length; every other one shares its beginning with the one before."""
    seed = number // 2
    return [(7 * i + 13 * seed) % 320 for i in range(200 + 40 * number)]


async def _generate(flow: CacheFlow, name: str, prompt: list[int], gap: int) -> None:
    session = flow.session(name)
    async for _ in session.generate(prompt[:-gap] or prompt, max_new_tokens=2):
        pass
    await session.forget()


async def test_eight_at_once(model_folder: Path, tmp_path: Path) -> None:
    """Tokens by source are the prompts' tokens; bytes are those of the loads; nobody is busier than
    the wall clock."""
    observer = PrometheusObserver()
    events: list[Event] = []

    def both(event: Event) -> None:
        events.append(event)
        observer(event)

    engine = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(tmp_path / "store")}}
    start = time.monotonic()
    async with CacheFlow.open(
        Settings(tiers=[tier], staging_bytes=1 << 23), engine=engine, observer=both
    ) as flow:
        for gap in (100, 1):  # parts of them are stored, then all come at once
            await asyncio.gather(*(_generate(flow, f"s{n}", _prompt(n), gap) for n in range(8)))
            await flow.flush()
    wall = time.monotonic() - start
    await engine.aclose()

    value = observer.registry.get_sample_value
    answered = [event for event in events if isinstance(event, FirstToken)]
    assert len(answered) == 16
    assert {"hit", "partial", "miss"} & {event.outcome for event in answered}
    for event in answered:
        assert sum(event.cells.values()) == event.prompt_tokens * event.num_layers
    sources = ("resident", "suffix", "recompute", "shared", "disk")
    counted = sum(value("cacheflow_prompt_tokens_total", {"source": s}) or 0 for s in sources)
    assert counted == pytest.approx(sum(event.prompt_tokens for event in answered), rel=1e-12)

    arrived = (LoadOutcome.PUBLISHED, LoadOutcome.DROPPED)
    moved = sum(e.nbytes for e in events if isinstance(e, LoadEnded) and e.outcome in arrived)
    loads = {"tier": "disk", "direction": "load"}
    assert moved > 0
    assert value("cacheflow_transfer_bytes_total", loads) == moved
    assert 0 < (value("cacheflow_io_busy_seconds_total", loads) or 0) <= wall
    stages = ({"stage": "prefix"}, {"stage": "suffix"})
    assert sum(value("cacheflow_compute_busy_seconds_total", s) or 0 for s in stages) <= wall

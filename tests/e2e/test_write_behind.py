"""Saved behind the answer, over a link that takes minutes: the next session has it at once."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_conversation_goes_on_before_it_is_stored(
    model_folder: Path, tmp_path: Path
) -> None:
    """Two turns in two sessions with everything forgotten in between, a disk behind a link of 20
    kB/s: the second turn restores what the first has not stored yet; leaving gives up in time;
    what did get stored is restored by the next process, to the same tokens."""
    chance = random.Random(3)
    prompt = [chance.randrange(320) for _ in range(400)]
    disk = {"path": str(tmp_path / "s")}
    link = {"inner": "nvme", "inner_options": disk, "bandwidth": 20e3}
    tiers = [{"name": "link", "backend": "throttled", "options": link}]
    settings: dict[str, Any] = {"staging_bytes": 1 << 23, "flush_seconds": 1.0}
    engine: Any = await TransformersEngine.open_model(
        model_folder, dtype="float32", grid=TileGrid((32, 32, 64), 128), chunk_tokens=16
    )

    async def ask(flow: CacheFlow, name: str, policy: str) -> tuple[list[int], Generation]:
        report = Generation()
        stream = flow.session(name).generate(
            prompt, max_new_tokens=4, policy=policy, report=report, save=name == "first"
        )
        tokens = [token async for token in stream]
        await flow.session(name).forget()
        return tokens, report

    try:
        async with (
            asyncio.timeout(30),
            CacheFlow.open(Settings(tiers=tiers, **settings), engine=engine) as flow,
        ):
            cold, first = await ask(flow, "first", "recompute")
            assert first.saved is not None
            assert first.saved["link"].pending >= 20
            warm, second = await ask(flow, "second", "load")
            assert warm == cold
            assert second.restoration is not None
            assert second.restoration.loaded_cells.get("staged", 0) >= 20 * 16 * 4
        assert first.saved["link"].dropped > 0
        nvme = [{"name": "disk", "backend": "nvme", "options": disk}]
        async with CacheFlow.open(Settings(tiers=nvme, **settings), engine=engine) as flow:
            again, third = await ask(flow, "third", "load")
            assert again == cold
            assert third.cached_tokens >= 16 * (first.saved["link"].stored - 1)
    finally:
        await engine.aclose()

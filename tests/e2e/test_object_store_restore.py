"""A real engine over an object store: what one process stored, another restores, on a server."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from cacheflow.testing.s3_server import S3Server


async def test_a_conversation_comes_back_from_s3(
    model_folder: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second CacheFlow over the same bucket finds the chunks that the first one stored, through
    the tier's index and guard, and goes on with the same tokens. (How much it loads and how much
    it computes meanwhile is up to the machine.)"""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    tier = TierSettings(
        name="bucket", backend="object-store", options=s3_server.options("conversations")
    )
    chance = random.Random(0)
    prompt = [chance.randrange(320) for _ in range(300)]
    answers, saved = [], []
    for _ in range(2):
        engine = await TransformersEngine.open_model(
            model_folder, dtype="float32", grid=TileGrid((32, 32, 64), 128), chunk_tokens=16
        )
        report = Generation()
        async with CacheFlow.open(Settings(tiers=(tier,)), engine=engine) as flow:
            session = flow.session("talk")
            work = session.generate(prompt, max_new_tokens=8, policy="load", report=report)
            answers.append([token async for token in work])
            assert await flow.flush()
        await engine.aclose()
        assert report.saved is not None
        saved.append(report.saved["bucket"])
    assert answers[0] == answers[1]
    assert (saved[0].stored, saved[1].stored) == (19, 0)
    assert saved[1].kept == 19
    assert await asyncio.to_thread(s3_server.unfinished_uploads) == 0

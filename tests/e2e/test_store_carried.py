"""A session's KV carried to another machine: exported by its tokens, imported, restored there."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SALT = "a tenant's own"


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


async def turn(model: Path, store: Path, prompt: list[int], policy: str) -> tuple[list[int], int]:
    """The greedy continuation, and how many tokens of the prompt were restored."""
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(store)}}
    settings = Settings(tiers=[tier], salt=SALT, policy=policy)
    engine = await TransformersEngine.open_model(model, dtype="float32", kv_bytes=1 << 28)
    report = Generation()
    try:
        async with CacheFlow.open(settings, engine=engine) as flow:
            stream = flow.session("s").generate(prompt, max_new_tokens=5, report=report)
            tokens = [token async for token in stream]
    finally:
        await engine.aclose()
    return tokens, report.cached_tokens


def test_a_session_is_carried_to_another_store(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported by its tokens, imported into an empty store, it is restored there with the same
    continuation; with another salt its keys are others, and nothing is found."""
    chance = random.Random(3)
    prompt = [chance.randrange(320) for _ in range(1100)]
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "archive"
    cold, _ = asyncio.run(turn(model_folder, here, prompt, "adaptive"))
    (tmp_path / "tokens").write_text(json.dumps(prompt))
    chosen = ("--tokens", tmp_path / "tokens", "--model", model_folder, "--dtype", "float32")
    assert "CACHEFLOW_SALT" in call("export", here, archive, *chosen, code=2)
    monkeypatch.setenv("CACHEFLOW_SALT", SALT)
    assert "4 objects exported" in call("export", here, archive, *chosen)
    asyncio.run(turn(model_folder, there, prompt[:10], "adaptive"))  # makes the store
    assert "4 objects stored" in call("import", there, archive)
    warm, cached = asyncio.run(turn(model_folder, there, prompt, "load"))
    assert cached == 1024
    assert warm == cold

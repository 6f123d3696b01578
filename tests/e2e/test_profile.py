"""`cacheflow profile` as people run it, and what a session keeps of its costs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.costs import CostStore, compute_key
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings, TierSettings

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import Event


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory and a tier of this test's own."""
    tiers = [
        {"name": "memory", "backend": "dram", "options": {"capacity_bytes": 64 << 20}},
        {"name": "disk", "backend": "nvme", "options": {"path": str(tmp_path / "disk")}},
    ]
    monkeypatch.setenv("CACHEFLOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHEFLOW_TIERS", json.dumps(tiers))
    monkeypatch.setenv("CACHEFLOW_KEEP_COSTS", "1")
    return tmp_path


def profile(model: Path, *arguments: str, code: int = 0) -> Any:
    fixed = ("--model", str(model), "--dtype", "float32")
    result = CliRunner().invoke(app, ["profile", *fixed, *arguments])
    assert result.exit_code == code, result.output
    return result


def test_everything_is_measured_and_kept(model_folder: Path, home: Path) -> None:
    """Tiles at several positions and widths, reads at several sizes and depths of each tier; the
    objects are gone afterwards, and the figures are kept for this model and these tiers."""
    result = profile(model_folder, "--tokens", "1024", "--json")
    stages = ["computing 1024 tokens", "reading tier memory", "reading tier disk"]
    assert result.stderr.splitlines() == stages  # told as they begin, as this is no terminal
    found = json.loads(result.stdout)
    tiles = found["compute"]["tiles"]
    assert {(tile["start"], tile["width"]) for tile in tiles} >= {
        *((0, 16), (0, 64), (0, 256)),
        *((0, 512), (512, 512)),
        *((1024, 16), (1024, 64), (1024, 256)),
    }
    assert all(tile["layer_ms"] > 0 and tile["tokens_per_second"] > 0 for tile in tiles)
    assert [channel["name"] for channel in found["channels"]] == ["memory", "disk"]
    for channel in found["channels"]:
        assert channel["bytes_per_second"] > 0
        assert channel["latency_ms"] >= 0
        assert channel["depth"] >= 1
        assert {read["depth"] for read in channel["reads"]} == {1, 2, 4, 8}
        assert len({read["nbytes"] for read in channel["reads"]}) > 1
    assert found["kept"]
    kept = json.loads((home / "cache" / "costs.json").read_text(encoding="utf-8"))["entries"]
    assert len(kept) == 3
    listed = CliRunner().invoke(app, ["store", "ls", str(home / "disk"), "--json"])
    assert json.loads(listed.stdout)["objects"] == []


def test_tables_for_people(model_folder: Path, home: Path, tmp_path: Path) -> None:
    """Without `--json` it is a table each for the engine and every tier, `--folder` included."""
    shown = profile(model_folder, "--tokens", "256", "-f", str(tmp_path / "more")).stdout
    for text in (
        "ms a layer",
        "tokens/s",
        "tier memory",
        "tier disk",
        "MB/s",
        "latency",
        "kept in",
    ):
        assert text in shown


def test_a_tier_that_cannot_be_used_does_not_spoil_the_rest(
    model_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too small for one object: said, exit code 1, and everything else is measured and kept."""
    small = {"name": "small", "backend": "dram", "options": {"capacity_bytes": 4096}}
    monkeypatch.setenv("CACHEFLOW_TIERS", json.dumps([small]))
    found = json.loads(profile(model_folder, "--tokens", "256", "--json", code=1).stdout)
    (channel,) = found["channels"]
    assert "store" in channel["error"]
    assert found["kept"]
    assert len(json.loads((home / "cache" / "costs.json").read_text())["entries"]) == 1


def test_more_tokens_than_the_context_is_one_clean_line(model_folder: Path, home: Path) -> None:
    """The message names the option and the most that fits."""
    result = profile(model_folder, "--tokens", "4096", code=2)
    assert "--tokens 4096" in result.output
    assert "at most 1792" in result.output


async def turn(engine: Any, settings: Settings, events: list[Event]) -> Any:
    """One prompt, stored; what the scheduler knew of compute when it began."""
    async with CacheFlow.open(settings, engine=engine, observer=events.append) as flow:
        compute = flow.restorer.scheduler._outlook.compute
        known = compute.profile()
        session = flow.session("s")
        prompt = [1 + i % 300 for i in range(600)]
        async for _ in session.generate(prompt, max_new_tokens=2):
            pass
        await session.forget()
        async for _ in session.generate(prompt, max_new_tokens=2):
            pass
        return known


async def test_a_session_begins_with_what_the_last_one_learned(
    model_folder: Path, tmp_path: Path
) -> None:
    """The first start is cold; it leaves its costs; a file damaged meanwhile is a cold one too."""
    tier = TierSettings(name="disk", backend="nvme", options={"path": str(tmp_path / "disk")})
    settings = Settings(cache_dir=tmp_path / "cache", tiers=(tier,), keep_costs=True)
    path = settings.cache_dir / "costs.json"
    engine = await TransformersEngine.open_model(model_folder, dtype="float32", device="cpu")
    try:
        events: list[Event] = []
        assert await turn(engine, settings, events) is None
        assert any(type(event).__name__ == "CostChecked" for event in events)
        key = compute_key(engine.identity, engine.grid_id)
        assert await asyncio.to_thread(CostStore(path).compute, key) is not None
        assert await turn(engine, settings, []) is not None
        path.write_bytes(b"{")
        assert await turn(engine, settings, []) is None
        assert await asyncio.to_thread(CostStore(path).compute, key) is not None
        off = Settings(cache_dir=tmp_path / "none", tiers=(tier,), keep_costs=False)
        assert await turn(engine, off, []) is None
        assert not (tmp_path / "none").exists()
    finally:
        await engine.aclose()

"""An agent whose server forgets at each tool call, and ends: the benchmark's runs, much smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from agent_child import LIVE, Life, live
from agent_report import identical
from bench_agents import lived

if TYPE_CHECKING:
    from pathlib import Path

TURNS = 3


@pytest.fixture
def life(model_folder: Path, tmp_path: Path) -> Life:
    """Of a server that never forgets, on the tiny model."""
    return Life(
        model=str(model_folder),
        threads=1,
        store=str(tmp_path / "never" / "kv"),
        first=0,
        stop=TURNS,
        turns=TURNS,
        ways=(LIVE,),
        tokens=[],
        forget=False,
        chunk=64,
    )


async def test_forgotten_and_restarted_an_agent_says_the_same(life: Life, tmp_path: Path) -> None:
    """Another process, which knows only the context and the store, goes on in the middle; each
    turn's tokens are those of a server that never forgets, and all but the tool's result was
    restored."""
    said: list[dict[str, Any]] = []
    await live(life, said.append)
    *never, _ = said
    forgetful = replace(
        life,
        store=str(tmp_path / "agent" / "kv"),
        ways=("recompute", "load", LIVE),
        bandwidth=20e6,
        forget=True,
    )
    said = []
    await live(replace(forgetful, stop=2), said.append)
    *agent, end = said
    rest = await lived(replace(forgetful, first=2, tokens=end["tokens"]), lambda: None)
    agent += rest.turns
    for before, after in zip(never, agent, strict=True):
        assert identical(before["answer"], after["answer"], after["ways"])
    for turn in agent[1:]:
        ways = turn["ways"]
        assert max(ways[LIVE]["suffix"], ways["load"]["suffix"]) <= 64
        assert not any(way["failed_loads"] for way in ways.values())
        assert ways["recompute"]["recomputed_share"] == 1.0
        assert ways["load"]["recomputed_share"] == 0.0

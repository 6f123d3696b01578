"""What a turn left of a tile: where a prefix ends, whatever tiers know of it and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cacheflow.restore import RestoreRequest, lookups
from cacheflow.scheduling import load_policy
from tests.unit.restore.test_restorer import TOKENS, rig

if TYPE_CHECKING:
    from cacheflow.restore import Restoration
    from cacheflow.types import TileWork
    from tests.unit.restore.test_restorer import Rig

STORED = 448
"""28 chunks of 16: half of the tile from 384 to 512, in which the prompt ends."""


async def restored(r: Rig, had: int, policy: str = "adaptive") -> Restoration:
    """A session that had the KV of ``had`` tokens comes back with all of them."""
    await r.engine.open("r", TOKENS)
    request = RestoreRequest("r", TOKENS, r.keys, r.restorer.clock.now())
    done = await r.restorer.run(replace(request, had=had), load_policy(policy))
    assert r.engine.wrong_cells("r", len(TOKENS)) == []
    await r.engine.close("r")
    return done


@pytest.mark.parametrize("policy", ["adaptive", "load", "two-pointer", "cake", "staircase"])
async def test_a_piece_of_a_tile_can_be_loaded(policy: str) -> None:
    """The prefix ends with the last stored chunk: no missing one spoils the piece."""
    async with rig() as r:
        await r.fill(STORED)
        done = await restored(r, 0, policy)
        assert (done.prefix_tokens, done.suffix_tokens) == (STORED, len(TOKENS) - STORED)
        if policy == "load":
            assert done.recomputed_cells == 0


@pytest.mark.parametrize(
    ("had", "prefix"), [(STORED, STORED), (STORED + 15, STORED), (380, 496), (0, 496), (999, 496)]
)
async def test_where_the_tier_is_late_the_session_knows(had: int, prefix: int) -> None:
    """Compute begins before the answer. The prefix ends with what the session had; where that says
    nothing of the last tile, with the last whole chunk."""
    async with rig(deadline=60) as r:
        await r.fill(STORED)
        answer, loop = asyncio.Event(), asyncio.get_running_loop()

        def begun(work: TileWork, layer: int) -> None:
            loop.call_soon_threadsafe(answer.set)

        async def wait() -> None:
            await answer.wait()

        r.engine.before_layer = begun
        r.store.before_lookup = wait
        done = await restored(r, had)
        assert (done.prefix_tokens, done.suffix_tokens) == (prefix, len(TOKENS) - prefix)


async def test_where_nobody_is_asked_the_session_says_nothing() -> None:
    """Recompute takes whole tiles: their bits are the grid's."""
    async with rig() as r:
        done = await restored(r, STORED, "recompute")
        assert done.prefix_tokens == 496


@pytest.mark.parametrize(("share", "prefix"), [(1e9, STORED), (0.0, 496)])
async def test_long_prompts_wait_longer_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, share: float, prefix: int
) -> None:
    """For a share of what recompute takes, once that is known."""
    async with rig(deadline=60) as r:
        await restored(r, 0, "recompute")
        await r.fill(STORED)

        async def yielding() -> None:
            for _ in range(100):
                await asyncio.sleep(0)

        r.store.before_lookup = yielding
        monkeypatch.setattr(lookups, "_GRACE", 0.0)
        monkeypatch.setattr(lookups, "_PATIENCE", 60.0)
        monkeypatch.setattr(lookups, "_SHARE", share)
        assert (await restored(r, 0)).prefix_tokens == prefix

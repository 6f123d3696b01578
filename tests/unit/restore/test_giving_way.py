"""Stores give way to the loads of their tier, and to nobody else's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Traffic, write_behind
from cacheflow.tiers.write_behind import GivingWay
from tests.unit.restore.saving import CHUNKS, rig, turns_of_the_loop, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.restore.saving import Rig

FOR_EVER = 1000.0


def test_stores_get_a_tenth_of_the_time() -> None:
    """From one beginning to the next ten times what the last one took; the first one begins at
    once, and no gap is longer than a second, however long a tier took."""
    way = GivingWay()
    assert way.wait(5.0) == 0.0
    way.began(5.0)
    assert way.wait(5.0) == 0.0
    way.took(0.02)
    way.began(6.0)
    assert way.wait(6.05) == pytest.approx(0.15)
    assert way.wait(6.3) == 0.0
    way.took(30.0)
    way.began(7.0)
    assert way.wait(7.0) == 1.0


@pytest.fixture(name="loading")
async def _loading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Rig, Traffic]]:
    """Tier ``a`` is being loaded from, its stores are slow; ``b`` is not."""
    monkeypatch.setattr(write_behind, "_LONGEST", FOR_EVER)
    traffic = Traffic()
    async with rig({"a": MemoryBackend(), "b": MemoryBackend()}, traffic=traffic) as r:
        r.saver._writers["a"]._gate.took(FOR_EVER)
        traffic.began("a")
        yield r, traffic


async def test_a_tier_that_is_loaded_from_stores_one_and_rests(
    loading: tuple[Rig, Traffic],
) -> None:
    """Others store on. When the last load has ended it goes on at once."""
    r, traffic = loading
    traffic.began("a")
    saved = r.saver.save("r", await r.open("r"))
    await until(lambda: saved["b"].stored == CHUNKS)
    await turns_of_the_loop()
    assert saved["a"].stored == 1
    traffic.ended("a")
    await turns_of_the_loop()
    assert saved["a"].stored == 1
    traffic.ended("a")
    await until(lambda: saved["a"].stored == CHUNKS)


async def test_whoever_waits_for_stores_waits_for_no_loads(loading: tuple[Rig, Traffic]) -> None:
    """While somebody flushes nothing gives way."""
    r, traffic = loading
    saved = r.saver.save("r", await r.open("r"))
    await until(lambda: saved["a"].stored == 1)
    assert await r.saver.flush(20)
    assert saved["a"].stored == CHUNKS
    traffic.ended("a")


async def test_a_rest_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that never end do not starve a tier's stores."""
    monkeypatch.setattr(write_behind, "_LONGEST", 1e-3)
    traffic = Traffic()
    async with rig({"a": MemoryBackend()}, traffic=traffic) as r:
        traffic.began("a")
        r.saver._writers["a"]._gate.took(FOR_EVER)
        saved = r.saver.save("r", await r.open("r"))
        await until(lambda: saved["a"].stored == CHUNKS)


@pytest.mark.parametrize("steps", range(3))
async def test_closing_ends_a_rest(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gave way is dropped and counted, like everything else that is not stored by then."""
    monkeypatch.setattr(write_behind, "_LONGEST", FOR_EVER)
    traffic = Traffic()
    traffic.began("a")
    async with asyncio.timeout(20), rig({"a": MemoryBackend()}, traffic=traffic) as r:
        r.saver._writers["a"]._gate.took(FOR_EVER)
        saved = r.saver.save("r", await r.open("r"))["a"]
        await turns_of_the_loop(20 * steps)
    assert saved.pending == 0
    assert saved.stored + saved.dropped == CHUNKS
    assert saved.stored <= 1

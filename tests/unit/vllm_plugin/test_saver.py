"""The worker's half of saving by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from cacheflow.clock import SystemClock
from cacheflow.memory import StagingPool
from cacheflow.plugins.vllm.blocks import BlockMemory
from cacheflow.plugins.vllm.counts import Counts
from cacheflow.plugins.vllm.finder import Finder
from cacheflow.plugins.vllm.means import Means
from cacheflow.plugins.vllm.records import SaveOrder
from cacheflow.plugins.vllm.saver import Provenance, Saver
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Traffic, write_behind
from cacheflow.types import NO_ID, Shard
from tests.cancelling import Held
from tests.unit.restore.saving import until
from tests.unit.vllm_plugin.minivllm import LAYOUT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


FOR_EVER: Final = 1000.0
SAVES: Final = 6
Made = Callable[..., tuple[Means, Saver]]


@pytest.fixture(name="made")
async def _made(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    """A saver over memory tiers of these names whose stores, they believe, take very long."""
    monkeypatch.setattr(write_behind, "_LONGEST", FOR_EVER)
    threads, pools = ThreadPoolExecutor(1), []

    def make(*names: str, staging: int = 1 << 16) -> tuple[Means, Saver]:
        pools.append(pool := StagingPool(staging))
        counts, shard = Counts(), Shard.of(LAYOUT)
        caches = [torch.zeros(4, LAYOUT.layer_bytes(), dtype=torch.uint8) for _ in range(2)]
        tiers: Any = {name: MemoryBackend() for name in names}
        means = Means(
            tiers,
            BlockMemory(caches, LAYOUT),
            shard,
            pool,
            threads,
            SystemClock(),
            5.0,
            _nothing,
            _nothing,
            counts,
            Traffic(),
        )
        finder = Finder(tiers, shard, "x", 5.0, counts)
        saver = Saver(means, finder, Provenance("x", "y", NO_ID))
        for gate in saver._gates.values():
            gate.took(FOR_EVER)
        return means, saver

    yield make
    threads.shutdown()
    for pool in pools:
        assert pool.leased_bytes == 0
        await pool.aclose()


@pytest.mark.parametrize("step", ["copied", "sealed"])
async def test_memory_is_not_used_again_while_a_thread_is_at_it(
    step: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing gives up what is being stored; a block that is just being copied, or sealed, keeps
    its staging memory until the thread has ended."""
    means, saver = made("store")
    pool = means.pool
    owner: Any = means.memory if step == "copied" else saver
    name = "read" if step == "copied" else "_sealed"
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, held)
    saver.put(order(1))
    running = asyncio.create_task(saver.run())
    assert await asyncio.to_thread(held.began.wait, 20)
    running.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pool.leased_bytes > 0
    held.go.set()
    await asyncio.wait([running])
    assert pool.leased_bytes == 0


async def test_stores_give_way_to_the_loads_of_their_tier(made: Made) -> None:
    """A tier that is loaded from takes one and rests, as others store on; when the last load has
    ended it goes on at once."""
    means, saver = made("busy", "idle")
    means.traffic.began("busy")
    async with saving(saver):
        for number in range(SAVES):
            saver.put(order(number))
        await until(lambda: stored(means, "idle") == SAVES)
        await asyncio.sleep(0)
        assert stored(means, "busy") == 1
        assert len(saver.outcomes) <= 1
        assert len(saver.copied) == SAVES, "blocks are free as soon as they are copied"
        means.traffic.ended("busy")
        await until(lambda: len(saver.outcomes) == SAVES)
    assert all(outcome.stored for outcome in saver.outcomes)
    assert stored(means, "busy") == SAVES


async def test_nothing_gives_way_where_staging_memory_is_short(made: Made) -> None:
    """Blocks stay pinned until they are copied: what waits for memory is worth more than a rest,
    and nothing is dropped."""
    means, saver = made("busy", staging=2 * LAYOUT.payload_bytes())
    means.traffic.began("busy")
    async with saving(saver):
        for number in range(SAVES):
            saver.put(order(number))
        await until(lambda: stored(means, "busy") >= SAVES - 2)
        means.traffic.ended("busy")
        await until(lambda: len(saver.outcomes) == SAVES)
    assert all(outcome.stored for outcome in saver.outcomes)


async def test_closing_waits_for_no_loads(made: Made) -> None:
    """What is staged is stored before the worker goes, loads or none."""
    means, saver = made("busy")
    means.traffic.began("busy")
    async with saving(saver):
        for number in range(SAVES):
            saver.put(order(number))
        await until(lambda: len(saver.copied) == SAVES)
        await saver.settled()
    assert stored(means, "busy") == SAVES


@asynccontextmanager
async def saving(saver: Saver) -> AsyncIterator[None]:
    """``saver`` runs, within bounds."""
    running = asyncio.create_task(saver.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        running.cancel()
        await asyncio.wait([running])


def stored(means: Means, tier: str) -> int:
    backend: Any = means.tiers[tier]
    return len(backend.objects)


def order(number: int) -> SaveOrder:
    """Of one block, with a key of its own."""
    return SaveOrder(number, number.to_bytes(32, "big"), 0, 0, 16, NO_ID)


def _nothing() -> None:
    """Nobody is told."""

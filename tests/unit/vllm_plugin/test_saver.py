"""The worker's half of saving by itself."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
from cacheflow.types import NO_ID, Shard
from tests.cancelling import Held
from tests.unit.vllm_plugin.minivllm import LAYOUT


@pytest.mark.parametrize("step", ["copied", "sealed"])
async def test_memory_is_not_used_again_while_a_thread_is_at_it(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing gives up what is being stored; a block that is just being copied, or sealed, keeps
    its staging memory until the thread has ended."""
    threads, pool, counts = ThreadPoolExecutor(1), StagingPool(1 << 16), Counts()
    caches = [torch.zeros(4, LAYOUT.layer_bytes(), dtype=torch.uint8) for _ in range(2)]
    memory, shard = BlockMemory(caches, LAYOUT), Shard.of(LAYOUT)
    tiers: Any = {"store": MemoryBackend()}
    means = Means(
        tiers, memory, shard, pool, threads, SystemClock(), 5.0, _nothing, _nothing, counts
    )
    saver = Saver(means, Finder(tiers, shard, "x", 5.0, counts), Provenance("x", "y", NO_ID))
    owner: Any = memory if step == "copied" else saver
    name = "read" if step == "copied" else "_sealed"
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, held)
    saver.put(SaveOrder(1, bytes(32), 0, 0, 16, NO_ID))
    running = asyncio.create_task(saver.run())
    assert await asyncio.to_thread(held.began.wait, 20)
    running.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert pool.leased_bytes > 0
    held.go.set()
    await asyncio.wait([running])
    assert pool.leased_bytes == 0
    threads.shutdown()
    await pool.aclose()


def _nothing() -> None:
    """Nobody is told."""

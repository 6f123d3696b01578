"""Restores that are cancelled, or closed, at a bad moment: nothing goes on, nothing is left."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.errors import ClosedError
from cacheflow.memory import StagingPool
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import Claim, RestoreEnded
from tests.conftest import FULL
from tests.faults.restoring import TOKENS, rig

if TYPE_CHECKING:
    from cacheflow.types import TileWork


async def test_closing_twice_interrupted_leaves_no_task() -> None:
    """Cancelling the close of a restorer, again and again, while a layer runs: it still waits for
    that layer, ends its request and its tasks."""
    before = asyncio.all_tasks()
    engine, go, began = FakeEngine(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def block(work: TileWork, layer: int) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(10)

    engine.before_layer = block
    pool = StagingPool(1 << 20)
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    restorer = Restorer(engine, scheduler, {"s": MemoryBackend()}, pool)
    await engine.open("r", TOKENS)
    leave = asyncio.Event()

    async def live() -> None:
        async with restorer:
            await leave.wait()

    living = asyncio.create_task(live())
    await asyncio.sleep(0)
    request = RestoreRequest("r", TOKENS, (), 0.0)
    running = asyncio.create_task(restorer.run(request, load_policy("recompute")))
    await began.wait()
    leave.set()
    for _ in range(5):
        await asyncio.sleep(0)
        living.cancel()
    assert not living.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await living
    with pytest.raises(ClosedError):
        await running
    assert asyncio.all_tasks() == before
    assert scheduler._requests == {}
    await engine.close("r")
    await pool.aclose()
    engine.shutdown()


async def test_a_cancelled_request_is_counted_once_it_has_ended() -> None:
    """Its last event comes after its last layer, and counts it; nothing is announced twice."""
    async with rig() as r:
        go, began = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def block(work: TileWork, layer: int) -> None:
            if layer == 2:
                loop.call_soon_threadsafe(began.set)
                assert go.wait(10)

        r.engine.before_layer = block
        await r.engine.open("r", TOKENS)
        task = asyncio.create_task(r.run(policy="recompute"))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not any(isinstance(event, RestoreEnded) for event in r.events)
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        (ended,) = (event for event in r.events if isinstance(event, RestoreEnded))
        assert ended.outcome == "cancelled"
        assert ended.cells["recompute"] == 2 * 32
        await r.engine.close("r")


async def test_a_cancelled_request_is_refused_compute_at_once() -> None:
    """In the very turn of the loop in which it is cancelled: the compute thread may be about to
    begin a layer, and clean-up takes its first step one turn later."""
    async with rig() as r:
        go = threading.Event()
        works: list[TileWork] = []
        answers: list[Claim] = []
        loop, began = asyncio.get_running_loop(), asyncio.Event()

        def block(work: TileWork, layer: int) -> None:
            if layer == 2:
                works.append(work)
                loop.call_soon_threadsafe(began.set)
                assert go.wait(10)

        r.engine.before_layer = block
        await r.engine.open("r", TOKENS)
        task = asyncio.create_task(r.run(policy="recompute"))
        await began.wait()
        job = r.restorer.job("r")
        assert job is not None
        # Called right after the request's own task, which waits for the same future, has run.
        job.done.add_done_callback(
            lambda _: answers.append(r.restorer.scheduler.claim(works[0], 2))
        )
        task.cancel()
        await asyncio.sleep(0)
        assert answers == [Claim.REFUSED]
        go.set()
        await asyncio.wait([task])
        await r.engine.close("r")


async def test_a_name_is_free_again_as_soon_as_its_request_was_cancelled() -> None:
    """The same request id, cancelled at any step and asked for again at once: every byte right."""
    async with rig() as r:
        for steps in range(0, 120, 3 if FULL else 7):
            await r.engine.open("r", TOKENS)
            task = asyncio.create_task(r.run(policy="adaptive"))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await r.engine.close("r")
            await r.restore("r", "adaptive" if steps % 2 else "load")

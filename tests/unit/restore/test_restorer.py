"""The asyncio restorer over an engine that checks every byte, and a store that can misbehave."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.errors import BackendError, ClosedError
from cacheflow.kv import chunk_keys, key_root, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import LoadEnded, LoadOutcome, ObjectKey, RestoreEnded, Span, Write, tell
from tests.conftest import FULL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.restore import Restoration
    from cacheflow.types import Event, Read, TileWork

TOKENS = [(7 * i) % 101 for i in range(500)]
ROOT = key_root({"model": "fake"})


class Rig:
    """Everything a restore needs, with every observable in reach."""

    def __init__(self, engine: FakeEngine, restorer: Restorer, store: MemoryBackend) -> None:
        self.engine = engine
        self.restorer = restorer
        self.store = store
        self.events: list[Event] = []
        self.keys = chunk_keys(ROOT, TOKENS, engine.layout.chunk_tokens)

    async def fill(self, tokens: int, holes: Sequence[int] = ()) -> None:
        """Store the whole chunks of the first ``tokens``, except ``holes``."""
        layout = self.engine.layout
        for chunk, key in enumerate(self.keys[: tokens // layout.chunk_tokens]):
            if chunk in holes:
                continue
            payload = bytearray()
            for layer in range(layout.num_layers):
                payload += self.engine.expected(TOKENS, chunk, layer)
            name = ObjectKey(key, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
            info, header = seal(
                name, layout, memoryview(payload), grid_id="fake", segments=(), canonical=False
            )
            await self.store.store([Write(info, (buffer_from(header), buffer_from(payload)))])

    async def restore(self, policy: str = "adaptive", name: str = "r") -> Restoration:
        """Restore all tokens and check every byte."""
        await self.engine.open(name, TOKENS)
        try:
            result = await self.run(policy, name)
            assert self.engine.wrong_cells(name, len(TOKENS)) == []
            return result
        finally:
            await self.engine.close(name)

    async def run(self, policy: str = "adaptive", name: str = "r") -> Restoration:
        request = RestoreRequest(name, TOKENS, self.keys, self.restorer.clock.now())
        return await self.restorer.run(request, load_policy(policy))

    def assert_nothing_is_left(self) -> None:
        pool = self.restorer.pool
        assert pool.leased_bytes == 0
        assert pool.quarantined_bytes() == 0
        assert self.restorer._jobs == {}
        assert self.restorer.scheduler._requests == {}
        assert self.restorer.scheduler.channel("store").in_flight == 0
        assert self.engine.paused == []
        assert not self.restorer.traffic.is_loading("store")


@asynccontextmanager
async def rig(*, deadline: float = 5.0, channels: int = 1) -> AsyncIterator[Rig]:
    engine, store = FakeEngine(), MemoryBackend()
    clock = SystemClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), clock)
    pool = StagingPool(1 << 20)
    made: list[Rig] = []
    restorer = Restorer(
        engine,
        scheduler,
        {"store": store} if channels else {},
        pool,
        clock=clock,
        load_deadline=deadline,
        observer=lambda event: made[0].events.append(event),
    )
    async with restorer:
        made.append(Rig(engine, restorer, store))
        yield made[0]
        made[0].assert_nothing_is_left()
    engine.shutdown()
    await pool.aclose()


@pytest.mark.parametrize("policy", ["adaptive", "load", "recompute"])
async def test_every_byte_is_what_a_cold_run_computes(policy: str) -> None:
    """Whatever the policy, all KV of prefix and suffix is there and right."""
    async with rig() as r:
        await r.fill(len(TOKENS))
        result = await r.restore(policy)
        assert result.prefix_tokens == 496
        assert result.suffix_tokens == 4
        if policy == "recompute":
            assert r.store.reads == 0
        if policy == "load":
            assert result.recomputed_cells == 0


async def test_while_a_load_is_read_its_tier_counts_as_loaded_from() -> None:
    """Whoever stores into it gives way; into another tier nobody does."""
    async with rig() as r:
        await r.fill(len(TOKENS))
        seen = []

        async def note(read: Read) -> None:
            traffic = r.restorer.traffic
            seen.append((traffic.is_loading("store"), traffic.is_loading("other")))

        r.store.before_read = note
        await r.restore("load")
        assert set(seen) == {(True, False)}


async def test_nothing_stored_is_a_plain_prefill() -> None:
    """An empty store, or none at all, costs nothing but the recompute."""
    for channels in (0, 1):
        async with rig(channels=channels) as r:
            result = await r.restore()
            assert result.stored_tokens == 0
            assert result.loaded_cells == {}


@pytest.mark.parametrize("policy", ["adaptive", "load"])
async def test_holes_anywhere_are_recomputed(policy: str) -> None:
    """Any subset of chunks may be missing, the first included. A tenth of ``CACHEFLOW_FULL=1``."""
    chance = random.Random(5)
    for _ in range(100 if FULL else 10):
        async with rig() as r:
            holes = chance.sample(range(31), chance.randint(0, 31))
            await r.fill(len(TOKENS), holes)
            await r.restore(policy)


async def test_a_missing_layer_shard_is_a_hole_of_those_layers() -> None:
    """A chunk stored as two layer shards of which one is gone is loaded as far as it goes."""
    async with rig() as r:
        layout = r.engine.layout
        for chunk, key in enumerate(r.keys):
            for layers in (Span(0, 2), Span(2, 4)):
                if chunk % 5 == 0 and layers.start == chunk % 2 * 2:
                    continue
                payload = bytearray()
                for layer in layers:
                    payload += r.engine.expected(TOKENS, chunk, layer)
                name = ObjectKey(key, layers, Span(0, layout.num_kv_heads))
                info, header = seal(
                    name, layout, memoryview(payload), grid_id="", segments=(), canonical=False
                )
                await r.store.store([Write(info, (buffer_from(header), buffer_from(payload)))])
        result = await r.restore("load")
        assert 0 < result.recomputed_share < 1


async def test_corrupt_chunks_become_recompute() -> None:
    """One flipped bit in each of several chunks: caught, recomputed, never published."""
    async with rig() as r:
        await r.fill(len(TOKENS))
        for n, data in enumerate(r.store.objects.values()):
            if n % 3 == 0:
                data[-1 - 97 * n] ^= 0x10
        result = await r.restore("load")
        assert result.failed_loads > 0
        assert any(isinstance(e, LoadEnded) and e.outcome is LoadOutcome.CORRUPT for e in r.events)


async def test_short_and_vanished_objects_become_recompute() -> None:
    """An object cut off or deleted between lookup and load is a failed load, not wrong KV."""
    async with rig() as r:
        await r.fill(len(TOKENS))

        async def meddle(read: Read) -> None:
            names = list(r.store.objects)
            index = names.index(read.key) if read.key in r.store.objects else -1
            if index % 4 == 1:
                del r.store.objects[read.key]
            elif index % 4 == 2:
                del r.store.objects[read.key][5000:]

        r.store.before_read = meddle
        result = await r.restore("load")
        outcomes = {e.outcome for e in r.events if isinstance(e, LoadEnded)}
        assert {LoadOutcome.MISSING, LoadOutcome.SHORT} <= outcomes
        assert result.recomputed_cells > 0


async def test_storage_errors_become_recompute() -> None:
    """A backend that fails every read costs its loads and nothing else."""
    async with rig() as r:
        await r.fill(len(TOKENS))

        async def broken(read: Read) -> None:
            raise BackendError("disk on fire", operation="load")

        r.store.before_read = broken
        result = await r.restore("load")
        assert result.recomputed_share == 1.0


async def test_a_failing_lookup_is_a_miss() -> None:
    """A tier whose lookup fails has nothing; the request goes on."""
    async with rig() as r:
        await r.fill(len(TOKENS))

        async def broken() -> None:
            raise BackendError("no route", operation="lookup", is_temporary=True)

        r.store.before_lookup = broken
        result = await r.restore("load")
        assert result.loaded_cells == {}


@pytest.mark.parametrize("policy", ["adaptive", "load"])
async def test_hung_loads_are_given_up(policy: str) -> None:
    """Reads that never answer: the request completes by recompute, leases come back."""
    async with rig(deadline=0.05) as r:
        await r.fill(len(TOKENS))
        never = asyncio.Event()

        async def hang(read: Read) -> None:
            await never.wait()

        r.store.before_read = hang
        result = await r.restore(policy)
        assert result.recomputed_share == 1.0


async def test_a_hung_lookup_does_not_hold_up_compute() -> None:
    """Compute starts without the lookup's answer and the request does not wait for it."""
    async with rig(deadline=60) as r:
        await r.fill(len(TOKENS))
        never = asyncio.Event()

        async def hang() -> None:
            await never.wait()

        r.store.before_lookup = hang
        async with asyncio.timeout(10):
            result = await r.restore("adaptive")
        assert result.recomputed_share == 1.0


async def test_concurrent_requests_share_one_restorer() -> None:
    """Many at once: each complete and right."""
    async with rig() as r:
        await r.fill(len(TOKENS), holes=[3, 17])
        names = [f"r{i}" for i in range(8)]
        await asyncio.gather(*(r.restore("adaptive", name) for name in names))


async def test_an_engine_failure_reaches_its_request_only() -> None:
    """What the engine raises ends that request; the next one works."""
    async with rig() as r:
        await r.fill(len(TOKENS))

        def explode(work: TileWork, layer: int) -> None:
            if work.request_id == "bad":
                raise RuntimeError("out of memory")

        r.engine.before_layer = explode
        await r.engine.open("bad", TOKENS)
        with pytest.raises(RuntimeError, match="out of memory"):
            await r.run("recompute", "bad")
        await r.engine.close("bad")
        await r.restore("adaptive", "good")


async def test_cancel_at_every_await_leaves_nothing() -> None:
    """Cancelled after any number of loop steps: no lease, task, claim or hidden state is left. A
    third of the numbers, all of them under ``CACHEFLOW_FULL=1``; odd and even ones in turn."""
    finished = 0
    async with rig() as r:
        await r.fill(len(TOKENS), holes=[9])
        for steps in range(0, 400, 1 if FULL else 3):
            await r.engine.open("r", TOKENS)
            task = asyncio.create_task(r.run("load" if steps % 2 else "adaptive"))
            for _ in range(steps):
                await asyncio.sleep(0)
            finished += task.done()
            task.cancel()
            await asyncio.wait([task])
            r.assert_nothing_is_left()
            await r.engine.close("r")
            if finished > 3:
                break


async def test_cancel_while_a_layer_runs_waits_for_that_layer_only() -> None:
    """The engine is not closed under a running layer, and no further layer is claimed."""
    async with rig() as r:
        began, go = threading.Event(), threading.Event()
        layers: list[int] = []

        def block(work: TileWork, layer: int) -> None:
            layers.append(layer)
            if layer == 1:
                began.set()
                assert go.wait(10)

        r.engine.before_layer = block
        await r.engine.open("r", TOKENS)
        task = asyncio.create_task(r.run("recompute"))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert layers == [0, 1]
        await r.engine.close("r")


async def test_closing_fails_what_is_running() -> None:
    """Leaving the restorer ends its requests with ClosedError rather than hanging."""
    from cacheflow.errors import ClosedError

    engine, store = FakeEngine(), MemoryBackend()
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    pool = StagingPool(1 << 20)
    hold = threading.Event()

    def slow(work: TileWork, layer: int) -> None:
        hold.wait(0.2 if layer else 0)

    engine.before_layer = slow
    async with Restorer(engine, scheduler, {"store": store}, pool) as restorer:
        await engine.open("r", TOKENS)
        request = RestoreRequest("r", TOKENS, (), restorer.clock.now())
        task = asyncio.create_task(restorer.run(request, load_policy("recompute")))
        await asyncio.sleep(0.01)
    with pytest.raises(ClosedError):
        await task
    engine.shutdown()


async def test_an_observer_that_raises_is_not_noticed() -> None:
    """Metrics never raise into serving."""
    engine, store = FakeEngine(), MemoryBackend()
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    seen: list[str] = []

    def rude(event: Event) -> None:
        seen.append(type(event).__name__)
        raise ValueError("no")

    pool = StagingPool(1 << 20)
    async with Restorer(engine, scheduler, {"s": store}, pool, observer=rude) as restorer:
        await engine.open("r", TOKENS)
        request = RestoreRequest("r", TOKENS, (), restorer.clock.now())
        await restorer.run(request, load_policy("adaptive"))
    assert RestoreEnded.__name__ in seen
    engine.shutdown()


async def test_an_observer_that_lets_a_cancellation_out_is_not_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is the observer's own, and ends no task of ours; what ends a process does pass."""
    engine, seen = FakeEngine(), 0
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())

    def rude(event: Event) -> None:
        nonlocal seen
        seen += 1
        raise asyncio.CancelledError

    pool = StagingPool(1 << 20)
    async with (
        asyncio.timeout(60),
        Restorer(engine, scheduler, {"s": MemoryBackend()}, pool, observer=rude) as restorer,
    ):
        for name in ("a", "b"):
            await engine.open(name, TOKENS)
            request = RestoreRequest(name, TOKENS, (), restorer.clock.now())
            await restorer.run(request, load_policy("adaptive"))
    assert seen > 2
    assert "an observer failed" in caplog.text

    def ends(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tell(ends, RestoreEnded("r", "", "", 0.0, 0.0, 0.0, 0, 0, 1))
    engine.shutdown()


@pytest.mark.parametrize("which", ["compute", "load"])
async def test_a_driver_that_ends_before_its_time(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours in a driver: the requests end with an error, and so do those that come."""
    engine = FakeEngine()
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())

    def broken(*_: object) -> None:
        raise AssertionError("impossible")

    setattr(scheduler, f"next_{which}", broken)
    pool = StagingPool(1 << 20)
    restorer = Restorer(engine, scheduler, {"s": MemoryBackend()}, pool)
    # In a task of its own, which has ended: the group has nobody to cancel, and says so.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await asyncio.create_task(restorer.__aenter__())
    async with asyncio.timeout(60):
        await engine.open("r", TOKENS)
        for _ in range(2):
            request = RestoreRequest("r", TOKENS, (), restorer.clock.now())
            with pytest.raises(ClosedError):
                await restorer.run(request, load_policy("recompute"))
    assert "a driver has failed" in caplog.text
    with pytest.raises(BaseExceptionGroup):
        await restorer.__aexit__(None, None, None)
    engine.shutdown()


async def test_drivers_that_are_cancelled_under_a_request() -> None:
    """With all tasks of an event loop that ends: who waits for the restore is told."""
    engine, held, go = FakeEngine(), threading.Event(), threading.Event()

    def hold(work: TileWork, layer: int) -> None:
        held.set()
        assert go.wait(60)

    engine.before_layer = hold
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    before = asyncio.all_tasks()
    pool = StagingPool(1 << 20)
    async with (
        asyncio.timeout(60),
        Restorer(engine, scheduler, {"s": MemoryBackend()}, pool) as restorer,
    ):
        drivers = asyncio.all_tasks() - before
        await engine.open("r", TOKENS)
        request = RestoreRequest("r", TOKENS, (), restorer.clock.now())
        task = asyncio.create_task(restorer.run(request, load_policy("recompute")))
        await asyncio.to_thread(held.wait)
        for driver in drivers:
            driver.cancel()
        go.set()
        with pytest.raises(ClosedError):
            await task
        assert restorer.active_restores == 0
        await engine.close("r")
    engine.shutdown()

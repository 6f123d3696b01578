"""Engines and stores that break their contract cost their own request or load, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.errors import BackendError
from cacheflow.kv import chunk_keys
from cacheflow.memory import StagingPool
from cacheflow.restore import Restorer, RestoreRequest, lookups
from cacheflow.restore.transfer import verify_pieces
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import LoadEnded, LoadOutcome, RestoreEnded
from tests.faults.restoring import ROOT, TOKENS, fill, rig

if TYPE_CHECKING:
    from cacheflow.types import ChunkInfo, Event, Read, TileWork


async def test_a_copy_that_fails_ends_its_request_only() -> None:
    """What `publish` raises reaches its request; other requests and the restorer go on."""
    async with rig() as r:
        await r.engine.open("bad", TOKENS)
        real = r.engine.publish

        async def broken(request_id: str, parts: Any) -> None:
            if request_id == "bad":
                raise RuntimeError("no device")
            await real(request_id, parts)

        r.engine.publish = broken  # type: ignore[method-assign]
        results = await asyncio.gather(
            r.run("bad"), *(r.restore(f"r{i}") for i in range(3)), return_exceptions=True
        )
        assert isinstance(results[0], RuntimeError)
        assert not any(isinstance(result, BaseException) for result in results[1:])
        await r.engine.close("bad")
        assert (await r.restore()).recomputed_cells == 0


@pytest.mark.parametrize("error", [ValueError("bug"), KeyError("bug"), TimeoutError(), OSError(5)])
async def test_a_store_that_raises_anything_costs_its_loads(error: Exception) -> None:
    """A backend's own mistake (not one of our errors) in a load is a failed load."""
    async with rig() as r:

        async def broken(read: Read) -> None:
            raise error

        r.store.before_read = broken
        assert (await r.restore()).recomputed_share == 1.0
        r.store.before_read = None
        assert (await r.restore()).recomputed_cells == 0


@pytest.mark.parametrize("error", [ValueError("bug"), RuntimeError("bug"), TimeoutError()])
async def test_a_lookup_that_raises_anything_is_a_miss(error: Exception) -> None:
    """A backend's own mistake in a lookup costs its chunks."""
    async with rig() as r:

        async def broken() -> None:
            raise error

        r.store.before_lookup = broken
        assert (await r.restore()).loaded_cells == {}


class Shifted(MemoryBackend):
    """Answers each key with the objects of the next one."""

    async def lookup(self, keys: Any) -> Any:
        found = await super().lookup(keys)
        return [*found[1:], found[0]]


class Terse(MemoryBackend):
    """Forgets the misses."""

    async def lookup(self, keys: Any) -> Any:
        found = await super().lookup(keys)
        return found[: len(keys) // 2]


@pytest.mark.parametrize("kind", [Shifted, Terse])
async def test_a_lookup_that_answers_something_else_serves_nothing(
    kind: type[MemoryBackend], caplog: pytest.LogCaptureFixture
) -> None:
    """Valid objects of other chunks, or answers that cannot be told apart, are not used."""
    async with rig(kind()) as r:
        assert (await r.restore()).loaded_cells == {}
    assert any(record.levelno == logging.WARNING for record in caplog.records)


class Foreign(MemoryBackend):
    """Lists its objects as if they had been stored by a model of another geometry."""

    async def lookup(self, keys: Any) -> Any:
        def foreign(info: ChunkInfo) -> ChunkInfo:
            return replace(info, layout=replace(info.layout, num_kv_heads=1, head_dim=16))

        return [[foreign(info) for info in infos] for infos in await super().lookup(keys)]


class Opaque(MemoryBackend):
    """Lists its objects as packed in an engine's own way."""

    async def lookup(self, keys: Any) -> Any:
        found = await super().lookup(keys)
        return [[replace(info, layout_id="isa") for info in infos] for infos in found]


@pytest.mark.parametrize("kind", [Foreign, Opaque])
async def test_objects_of_another_layout_are_not_used(kind: type[MemoryBackend]) -> None:
    """The same bytes in another order would pass every checksum."""
    async with rig(kind()) as r:
        assert (await r.restore()).loaded_cells == {}


async def test_checksums_are_taken_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is verified, none on the event loop's thread."""
    threads = set()

    def watched(*arguments: Any) -> None:
        threads.add(threading.current_thread())
        verify_pieces(*arguments)

    monkeypatch.setattr("cacheflow.restore.loads.verify_pieces", watched)
    async with rig() as r:
        await r.restore()
    assert threads
    assert threading.main_thread() not in threads


async def test_a_load_that_lands_after_compute_took_its_cells_is_dropped() -> None:
    """Loads hang, compute walks through their cells, then they arrive after all: nothing is
    published over what was computed."""
    async with rig() as r:
        loop, arrive, dropped = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        async def hang(read: Read) -> None:
            await arrive.wait()

        def watch(event: Event) -> None:
            if isinstance(event, LoadEnded):
                r.events.append(event)
                dropped.set()

        def before(work: TileWork, layer: int) -> None:
            if work.is_suffix and layer == 0:
                loop.call_soon_threadsafe(arrive.set)
                assert dropped.wait(10)

        r.store.before_read, r.engine.before_layer, r.restorer._observer = hang, before, watch
        result = await r.restore(policy="adaptive")
        assert result.recomputed_share == 1.0
        assert result.dropped_loads == 1
        assert [e.outcome for e in r.events if isinstance(e, LoadEnded)] == [LoadOutcome.DROPPED]


async def test_a_hung_tier_does_not_starve_a_good_one() -> None:
    """One tier never answers and keeps its share of the staging memory in quarantine, all of
    it after four requests; six, one after another, still load everything from the other."""
    engine, good = FakeEngine(), MemoryBackend()
    await fill(good, engine, TOKENS)
    hung = Hung()
    await fill(hung, engine, TOKENS)
    pool = StagingPool(1 << 18)
    for name in ("hung", "good"):
        pool.set_cap(name, 1 << 17)
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    channels = {"hung": hung, "good": good}
    async with Restorer(engine, scheduler, channels, pool, load_deadline=1.2) as restorer:
        for number in range(6):
            await engine.open("r", TOKENS)
            keys = chunk_keys(ROOT, TOKENS, engine.layout.chunk_tokens)
            request = RestoreRequest("r", TOKENS, keys, restorer.clock.now())
            result = await restorer.run(request, load_policy("load"))
            assert engine.wrong_cells("r", len(TOKENS)) == []
            assert result.recomputed_cells == 0, number
            await engine.close("r")
        assert pool.quarantined_bytes("hung") > 0
        hung.let_go()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pool.quarantined_bytes() == pool.leased_bytes == 0
    await pool.aclose()
    engine.shutdown()


async def test_what_is_loaded_and_computed_all_the_same_counts_once() -> None:
    """Each tile has chunks in two tiers. Those of one are published, then the other fails, and
    compute writes the whole tiles: their tokens are compute's, and the sum is the prompt's."""
    engine, even, odd = FakeEngine(), MemoryBackend(), MemoryBackend()
    await fill(even, engine, TOKENS, 2, 0)
    await fill(odd, engine, TOKENS, 2, 1)
    pool, published = StagingPool(1 << 20), asyncio.Event()
    layers, size = engine.layout.num_layers, engine.layout.chunk_tokens
    chunks = (len(TOKENS) - 1) // size
    left = (chunks + 1) // 2 * layers
    ended: list[RestoreEnded] = []

    def watch(event: Event) -> None:
        nonlocal left
        if isinstance(event, LoadEnded) and event.outcome is LoadOutcome.PUBLISHED:
            left -= event.chunks * len(event.layers)
            if not left:
                published.set()
        elif isinstance(event, RestoreEnded):
            ended.append(event)

    async def fails(read: Read) -> None:
        await published.wait()
        raise BackendError("the disk is gone", operation="load")

    odd.before_read = fails
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
    channels = {"even": even, "odd": odd}
    async with Restorer(engine, scheduler, channels, pool, observer=watch) as restorer:
        await engine.open("r", TOKENS)
        request = RestoreRequest("r", TOKENS, chunk_keys(ROOT, TOKENS, size), 0.0)
        async with asyncio.timeout(20):
            result = await restorer.run(request, load_policy("load"))
        assert engine.wrong_cells("r", len(TOKENS)) == []
        await engine.close("r")
    await pool.aclose()
    engine.shutdown()
    assert result.recomputed_cells + sum(result.loaded_cells.values()) == chunks * size * layers
    assert result.recomputed_cells > chunks // 2 * size * layers
    assert sum(ended[0].cells.values()) == chunks * size * layers


class Hung(MemoryBackend):
    """Its reads never end; their buffers stay held until :meth:`let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    async def load(self, reads: Any) -> Any:
        for read in reads:
            read.buffer.hold.acquire()
            self.held.append(read.buffer.hold)
        await asyncio.Event().wait()
        yield

    def let_go(self) -> None:
        for hold in self.held:
            hold.release()


async def test_a_tier_that_owes_an_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request waits the moment that lookups have; those behind it do not, until the tier
    answers again: then what it has is loaded."""
    silent = asyncio.Event()

    async def hang(*_: object) -> None:
        await silent.wait()

    async with rig() as r:
        real, r.store.before_lookup = r.store.before_lookup, hang
        assert (await r.restore("first", "adaptive")).recomputed_share == 1.0
        monkeypatch.setattr(lookups, "_GRACE", 60.0)
        async with asyncio.timeout(20):
            assert (await r.restore("second", "adaptive")).recomputed_share == 1.0
        r.store.before_lookup = real
        assert (await r.restore("third")).recomputed_cells == 0
        assert not r.restorer._lookups._owing


async def test_a_lookup_error_is_one_of_ours() -> None:
    """The reason names the tier and the counts."""
    from cacheflow.tiers import locate

    store = Terse()
    keys = chunk_keys(ROOT, TOKENS, 16)
    with pytest.raises(BackendError, match=r"15 answers to 31 keys \(disk\)"):
        await locate("disk", store, keys, FakeEngine().layout)

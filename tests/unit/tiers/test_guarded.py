"""A guarded tier: deadlines, the breaker, probes, doubts; what callers see of a sick store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import BackendError, ClosedError
from cacheflow.memory import InFlight
from cacheflow.testing.faults import Fault, FaultKind
from cacheflow.tiers import Ailment, Guarded, HealthLimits
from cacheflow.types import ChunkKey, TierDown, TierUp, TransferStatus
from tests.unit.tiers.guarding import KEYS, OBJECTS, reads_of, rig, statuses

if TYPE_CHECKING:
    from cacheflow.types import Event

OK, LATE, REFUSED = TransferStatus.OK, TransferStatus.LATE, TransferStatus.REFUSED
SLOW_PROBES = HealthLimits(failures=3, first_wait=60.0)


async def test_a_tier_that_is_well_is_passed_through() -> None:
    """Bytes, misses and listings are the store's own; no event is told."""
    async with rig() as r:
        reads = reads_of(OBJECTS)
        results = [result async for result in r.tier.load(reads)]
        assert statuses(results) == {OK}
        assert [bytes(read.buffer.view or b"") for read in reads] == [o.data for o in OBJECTS]
        missing = [ChunkKey(bytes(32))]
        assert await r.tier.lookup([*KEYS, *missing]) == await r.store.lookup([*KEYS, *missing])
        assert {info async for info in r.tier.scan()} == {each.info for each in OBJECTS}
        assert await r.tier.used_bytes() == await r.store.used_bytes()
        assert await r.tier.delete([OBJECTS[0].key]) == [True]
        assert r.events == []


async def test_what_hangs_is_late_at_its_deadline_and_its_buffer_stays_held() -> None:
    """The rest of the batch is delivered; the tier is set aside, and the I/O that is still running
    keeps its buffer until it ends."""
    async with rig(deadline=0.05, limits=SLOW_PROBES) as r:
        hold = InFlight()
        r.faulty.inject(Fault(FaultKind.HANG, "load", times=1))
        results = await r.load(OBJECTS, hold)
        assert [result.status for result in results] == [OK] * 5 + [LATE]
        assert isinstance(results[-1].error, BackendError)
        assert hold.in_flight == 1
        down = await r.until(TierDown)
        assert (down.channel, down.direction, down.reason) == ("disk", "load", "late")
        r.faulty.release()
        assert hold.in_flight == 0


async def test_a_sick_tier_is_not_asked() -> None:
    """Lookups find nothing, reads and writes are refused, other calls raise: nothing of it gets to
    the store, and all of it is counted."""
    async with rig(deadline=0.05, limits=SLOW_PROBES) as r:
        await r.set_aside(Fault(FaultKind.HANG, "load", times=1))
        reads, calls = r.store.reads, r.faulty.strikes.total()
        assert await r.found() == 0
        assert statuses(await r.load()) == {REFUSED}
        assert statuses(await r.tier.store([OBJECTS[0].write()])) == {REFUSED}
        with pytest.raises(BackendError, match="set aside"):
            await r.tier.delete([OBJECTS[0].key])
        with pytest.raises(BackendError, match="set aside"):
            await r.tier.used_bytes()
        with pytest.raises(BackendError, match="set aside"):
            await anext(r.tier.scan().__aiter__())
        assert (r.store.reads, r.faulty.strikes.total()) == (reads, calls)
        counts = {"lookup": 6, "load": 6, "store": 1, "delete": 1, "used_bytes": 1, "scan": 1}
        assert r.tier.refused == counts


@pytest.mark.parametrize(
    "kind", [k for k in FaultKind if k not in (FaultKind.LOST, FaultKind.FULL, FaultKind.SLOW)]
)
async def test_whatever_is_wrong_with_reads_sets_it_aside_until_it_is_not(kind: FaultKind) -> None:
    """Every kind of fault, at every read: set aside, probed in vain while it lasts, taken back by a
    probe once it is over; what was doubted meanwhile is listed again when it is stored anew."""
    async with rig(deadline=0.05) as r:
        r.faulty.inject(Fault(kind, "load"))
        await r.load_until_sick()
        if kind in (FaultKind.TORN, FaultKind.FLIP, FaultKind.STALE):
            r.tier.distrust([each.key for each in OBJECTS])  # as the restorer does, who verifies
        await r.until(TierDown)
        strikes = r.faulty.strikes[kind]
        async with asyncio.timeout(10):
            while r.faulty.strikes[kind] < strikes + 2:
                assert not r.tier.reading.well
                await asyncio.sleep(0.01)
        r.faulty.heal()
        up = await r.until(TierUp)
        assert up.seconds > 0.0
        await r.tier.store([each.write() for each in OBJECTS])
        assert await r.found() == 6
        assert statuses(await r.load()) == {OK}


@pytest.mark.parametrize(
    "kind", [FaultKind.HANG, FaultKind.EIO, FaultKind.DISCONNECT, FaultKind.PARTIAL]
)
async def test_lookups_that_go_wrong_set_it_aside(kind: FaultKind) -> None:
    """They raise until then, and find nothing from then on."""
    async with rig(deadline=0.05) as r:
        r.faulty.inject(Fault(kind, "lookup"))
        raised = 0
        while r.tier.reading.well and raised < 9:
            with pytest.raises(BackendError):
                await r.found()
            raised += 1
        assert raised == (1 if kind is FaultKind.HANG else 3)
        assert await r.found() == 0
        r.faulty.heal()
        await r.until(TierUp)
        assert await r.found() == 6


async def test_one_probe_at_a_time_takes_it_back() -> None:
    """However many ask meanwhile: they are answered at once, and the store sees the probes alone,
    one after the other."""
    async with rig(deadline=0.05) as r:
        await r.load()
        running = most = probes = 0
        gate = asyncio.Event()

        async def counting() -> None:
            nonlocal running, most, probes
            running, probes = running + 1, probes + 1
            most = max(most, running)
            try:
                await gate.wait()
            finally:
                running -= 1

        await r.set_aside(Fault(FaultKind.HANG, "load", times=1))
        r.store.before_lookup = counting
        while not running:
            assert [await r.found() for _ in range(20)] == [0] * 20
            await asyncio.sleep(0.001)
        assert statuses(await r.load()) == {REFUSED}
        gate.set()
        await r.until(TierUp)
        assert (most, probes) == (1, 1)


async def test_an_object_that_cannot_be_read_is_a_miss_at_once() -> None:
    """Also for those who ask while the first still holds its answer; the others stay listed; once
    stored anew it is listed again."""
    async with rig(limits=HealthLimits(failures=100)) as r:
        del r.store.objects[OBJECTS[0].key]
        r.store.objects[OBJECTS[1].key] = r.store.objects[OBJECTS[1].key][:5000]
        results = await r.load()
        assert {str(each.status) for each in results} == {"ok", "missing", "short"}
        found = await r.tier.lookup(KEYS)
        assert [bool(infos) for infos in found] == [False, False, True, True, True, True]
        r.tier.distrust([OBJECTS[2].key])
        assert await r.found() == 3
        await r.tier.store([each.write() for each in OBJECTS[:3]])
        assert await r.found() == 6
        assert r.tier.reading.counts == {Ailment.SHORT: 1, Ailment.CORRUPT: 1}


async def test_a_store_that_ended_in_doubt_ends_doubts() -> None:
    """Cancelled half way it may have landed: whoever keeps an index asks, and has to be told."""
    async with rig(limits=HealthLimits(failures=100)) as r:
        r.tier.distrust([OBJECTS[0].key])
        assert await r.found() == 5
        r.faulty.inject(Fault(FaultKind.HANG, "store"))
        task = asyncio.create_task(r.tier.store([OBJECTS[0].write()]))
        await r.faulty.hanging.wait()
        assert await r.found() == 5
        task.cancel()
        await asyncio.wait([task])
        assert await r.found() == 6


async def test_missing_objects_do_not_make_it_sick() -> None:
    """Eviction between lookup and load is nobody's fault."""
    async with rig() as r:
        r.store.objects.clear()
        for _ in range(10):
            assert statuses(await r.load()) == {TransferStatus.MISSING}
        assert r.tier.reading.well


async def test_a_store_that_cannot_be_written_is_still_read() -> None:
    """Writes are refused after a few, reads go on; the first write after a while is the probe."""
    async with rig() as r:
        r.faulty.inject(Fault(FaultKind.EIO, "store"))
        writes = [OBJECTS[0].write()]
        ended = [(await r.tier.store(writes))[0].status for _ in range(4)]
        assert ended == [TransferStatus.FAILED] * 3 + [REFUSED]
        assert (await r.until(TierDown, "store")).reason == "failed"
        assert await r.found() == 6
        assert statuses(await r.load()) == {OK}
        r.faulty.heal()
        await r.until_a_write_may_probe()
        assert statuses(await r.tier.store(writes)) == {OK}
        await r.until(TierUp, "store")
        assert statuses(await r.tier.store(writes)) == {OK}


async def test_a_full_store_is_not_sick() -> None:
    """It says so each time; whoever evicts may try again."""
    async with rig() as r:
        r.faulty.inject(Fault(FaultKind.FULL))
        for _ in range(10):
            assert statuses(await r.tier.store([OBJECTS[0].write()])) == {TransferStatus.FULL}
        assert r.tier.writing.well


async def test_a_write_that_hangs_is_late_and_its_parts_stay_held() -> None:
    """The probe that hangs as well is late, too, and the next wait is longer."""
    async with rig(deadline=0.02) as r:
        r.faulty.inject(Fault(FaultKind.HANG, "store"))
        hold = InFlight()
        assert statuses(await r.tier.store([OBJECTS[0].write(hold=hold)])) == {LATE}
        assert hold.in_flight == 2
        await r.until_a_write_may_probe()
        assert statuses(await r.tier.store([OBJECTS[0].write(hold=hold)])) == {LATE}
        assert r.tier.writing.wait == 0.02
        r.faulty.release()
        assert hold.in_flight == 0


async def test_a_probe_write_that_is_cancelled_says_nothing() -> None:
    """The next write is a probe again, at once."""
    async with rig(deadline=0.02) as r:
        r.faulty.inject(Fault(FaultKind.HANG, "store", times=2))
        await r.tier.store([OBJECTS[0].write()])
        r.faulty.release()
        await r.until_a_write_may_probe()
        task = asyncio.create_task(r.tier.store([OBJECTS[0].write()]))
        await r.faulty.hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert statuses(await r.tier.store([OBJECTS[0].write()])) == {OK}
        assert r.tier.writing.well


@pytest.mark.parametrize("overdue", [False, True])
async def test_giving_a_read_up_counts_only_when_it_is_long_overdue(overdue: bool) -> None:
    """Whoever is done without it cancels it: on a tier that hangs nothing else may ever show."""
    async with rig(deadline=0.2) as r:
        await r.load()
        r.faulty.inject(Fault(FaultKind.HANG, "load", times=6))
        task = asyncio.create_task(r.load())
        await asyncio.sleep(0.1 if overdue else 0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert r.tier.reading.well != overdue
        assert r.tier.reading.counts == ({Ailment.OVERTAKEN: 1} if overdue else {})


async def test_leaving_a_load_early_is_no_fault() -> None:
    """Closing the iterator after the first result."""
    async with rig() as r:
        results: Any = r.tier.load(reads_of(OBJECTS))
        await anext(results)
        await results.aclose()
        assert r.tier.reading.counts == {}


async def test_closing_a_sick_tier_is_bounded_and_leaves_no_task() -> None:
    """With a probe that hangs under way; closed twice does no harm; closed is closed."""
    async with rig(deadline=0.05) as r:
        await r.load()
        await r.set_aside(Fault(FaultKind.HANG, "*"))
        r.faulty.release()
        await r.faulty.hanging.wait()
        async with asyncio.timeout(2):
            await r.tier.aclose()
            await r.tier.aclose()
        with pytest.raises(ClosedError):
            await r.found()


async def test_an_observer_that_raises_disturbs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the fall nor the recovery."""
    async with rig() as r:
        ups = asyncio.Event()

        def broken(event: Event) -> None:
            if isinstance(event, TierUp):
                ups.set()
            raise RuntimeError("no metrics")

        tier = Guarded(r.faulty, "d", limits=HealthLimits(1, 0.01, 0.01), observer=broken)
        r.faulty.inject(Fault(FaultKind.EIO, "lookup", times=1))
        with pytest.raises(BackendError):
            await tier.lookup(KEYS)
        async with asyncio.timeout(5):
            await ups.wait()
        assert len(await tier.lookup(KEYS)) == 6
        assert sum("observer failed" in record.message for record in caplog.records) == 2
        await tier.aclose()

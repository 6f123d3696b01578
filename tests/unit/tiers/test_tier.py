"""A tier: capacity, leases, quotas, expiry, and an index that is what the backend has."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.metrics import PrometheusObserver
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.testing.storage_harness import step_and_cancel
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable
from tests.unit.tiers.shelf import SIZE, Shelf, rig

OK, FULL = TransferStatus.OK, TransferStatus.FULL
ANN, BOB = b"a" * 16, b"b" * 16


async def test_a_backend_without_a_cap_gets_one() -> None:
    """However much is stored, the bytes in the backend never exceed the tier's capacity."""
    async with rig(objects=5) as r:
        for number in range(20):
            assert await r.store(number) == [OK]
        assert r.shelf.peak == 5
        assert r.there == [15, 16, 17, 18, 19]
        assert r.left == {"capacity": 15}
        await r.assert_exact()


async def test_many_stores_at_once_stay_under_the_cap() -> None:
    """What one store's eviction freed is not counted on by another before it is gone."""
    async with rig(objects=5) as r:
        await asyncio.gather(*(r.store(3 * n, 3 * n + 1, 3 * n + 2) for n in range(12)))
        assert r.shelf.peak <= 5
        await r.assert_exact()


async def test_what_a_lookup_promised_is_kept() -> None:
    """What a lookup returned can be loaded for as long as leases last, whatever is stored in the
    meantime; later it may be gone, and a load says so."""
    async with rig(objects=4, lease_seconds=10.0) as r:
        await r.store(0, 1, 2, 3)
        assert await r.found(0, 1) == [0, 1]
        for number in range(10, 20):
            assert await r.store(number) == [OK]
        assert await _load(r, 0) is OK
        assert r.there[:2] == [0, 1]
        r.clock.advance(10.0)
        await r.store(20, 21, 22)
        assert await _load(r, 0) is TransferStatus.MISSING
        await r.assert_exact()


async def test_what_is_being_read_is_not_evicted() -> None:
    """A read under way outlasts every lease; afterwards its object may go."""
    async with rig(objects=2) as r:
        await r.store(0, 1)
        gate = asyncio.Event()
        r.shelf.before_read = lambda read: _wait(gate)
        loading = asyncio.create_task(_load(r, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        r.clock.advance(1000.0)
        assert await r.store(2, 3) == [OK, FULL]
        gate.set()
        assert await loading is OK
        assert await r.store(4, 5) == [OK, OK]


async def test_no_room_is_said_at_once() -> None:
    """While all is leased a store is dropped and counted, not waited with; then it goes on."""
    async with rig(objects=3) as r:
        await r.store(0, 1, 2)
        assert await r.found(0, 1, 2) == [0, 1, 2]
        async with asyncio.timeout(5):
            assert await r.store(3) == [FULL]
        assert r.dropped == {"leased": 1}
        r.clock.advance(r.settings.lease_seconds)
        assert await r.store(3) == [OK]


async def test_sessions_that_pin_everything_do_not_wedge_the_pool() -> None:
    """A pin over its tenant's budget is refused; one under it delays eviction, and is broken and
    counted when nothing else is left."""
    async with rig(objects=4, pin_bytes=2 * SIZE) as r:
        await r.store(0, 1, 2, tenant=ANN)
        await r.store(3, tenant=BOB)
        keys = [make_object(number).key.chunk for number in range(4)]
        assert r.tier.pin(keys, 1000.0) == 3 * SIZE
        assert await r.store(4) == [OK]
        assert r.there == [0, 1, 3, 4], "what is not pinned goes first"
        assert await r.store(5) == [OK]
        assert r.left == {"capacity": 2}
        assert await r.store(6, 7, 8, 9) == [OK] * 4
        assert r.left == {"capacity": 3, "pin": 3}
        await r.assert_exact()


async def test_pins_end() -> None:
    """After its time a pinned object is evicted like any other."""
    async with rig(objects=2, pin_bytes=SIZE) as r:
        await r.store(0, 1)
        assert r.tier.pin([make_object(0).key.chunk], 50.0) == SIZE
        await r.store(2)
        assert r.there == [0, 2]
        r.clock.advance(50.0)
        await r.store(3, 4)
        assert r.there == [3, 4]
        assert "pin" not in r.left


async def test_a_tenant_over_its_quota_evicts_its_own() -> None:
    """One tenant's flood never takes another's objects, nor more than its quota."""
    async with rig(objects=6, tenant_quota_bytes=3 * SIZE) as r:
        await r.store(0, 1, tenant=BOB)
        for number in range(10, 20):
            assert await r.store(number, tenant=ANN) == [OK]
        assert r.there == [0, 1, 17, 18, 19]
        assert r.left == {"quota": 7}
        assert r.tier.catalogue.owned(ANN) == 3 * SIZE


async def test_every_way_out_is_accounted_for() -> None:
    """Deleted through the tier, behind its back, expired, evicted, replaced: the index is what the
    backend has, and there is room again for as much as was removed."""
    async with rig(Shelf(shared=True), objects=8, ttl=500.0) as r:
        await r.store(*range(8))
        assert await r.tier.delete([make_object(0).key, make_object(99).key]) == [True, False]
        await r.store(1)
        del r.shelf.objects[make_object(2).key]
        assert await r.found(1, 2, 3) == [1, 3]
        await r.assert_exact()
        assert r.left == {"deleted": 1, "vanished": 1}
        r.clock.advance(499.0)
        await r.store(20, 21)
        r.clock.advance(2.0)
        assert await r.found(3, 20) == [20]
        await r.assert_exact()
        assert r.there == [20, 21]
        assert await r.store(*range(30, 36)) == [OK] * 6
        assert not r.dropped


async def test_a_restart_counts_what_is_there() -> None:
    """A tier opened over existing objects keeps its capacity from the first store on, before its
    index is complete, and has them all in it afterwards."""
    shelf = Shelf()
    async with rig(shelf, objects=6) as r:
        await r.store(*range(6))
    shelf.gates["scan"].clear()
    shelf.peak = 0
    async with rig(shelf, objects=6, scanned=False) as r:
        assert await r.found(4) == [4], "lookups need no scan"
        assert await r.store(10) == [FULL]
        assert r.dropped == {"opening": 1}
        shelf.gates["scan"].set()
        await r.assert_exact()
        assert len(r.tier.catalogue) == 6
        assert await r.store(10) == [OK]
        assert shelf.peak == 6


async def test_a_smaller_capacity_is_enforced_at_once() -> None:
    """Objects beyond the capacity or a quota that is set now are evicted once they are listed."""
    shelf = Shelf()
    async with rig(shelf) as r:
        await r.store(*range(6))
    async with rig(shelf, objects=4) as r:
        assert len(r.there) == 4
        assert r.left == {"capacity": 2}
        await r.assert_exact()


async def test_a_full_backend_is_given_room() -> None:
    """Where the backend itself is full the tier evicts and tries once more; what then still does
    not fit is dropped and counted."""
    async with rig(Shelf(room=3)) as r:
        assert await r.store(0, 1, 2) == [OK] * 3
        assert await r.store(3, 4) == [OK] * 2
        assert r.left == {"full": 2}
        r.shelf.room = 0
        r.shelf.objects.clear()
        assert await r.store(5) == [FULL]
        assert r.dropped == {"full": 1}


async def test_a_store_filled_by_others_is_looked_at_again() -> None:
    """Full of objects that another process stored: they are listed, and evicted."""
    shelf = Shelf(room=3, shared=True)
    async with rig(shelf) as mine, rig(shelf) as others:
        await others.store(0, 1, 2)
        mine.clock.advance(100.0)
        assert await mine.store(3) == [OK]
        await mine.assert_exact()


async def test_an_eviction_that_fails_stays_counted() -> None:
    """What could not be deleted counts as used until the backend says what is there: the capacity
    is never exceeded, and nothing is counted twice."""
    async with rig(objects=3) as r:
        await r.store(0, 1, 2)
        r.shelf.broken.add("delete")
        assert await r.store(3) == [TransferStatus.FAILED]
        assert r.tier.catalogue.used == 3 * SIZE
        r.shelf.broken.clear()
        await r.assert_exact()
        assert await r.store(3) == [OK]
        assert r.shelf.peak == 3


async def test_evictions_that_fail_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line at once, and how often after a minute."""
    async with rig(objects=3) as r:
        await r.store(0, 1, 2)
        r.shelf.broken.add("delete")
        for number in range(3, 23):
            assert await r.store(number) == [TransferStatus.FAILED]
        assert caplog.text.count("nothing could be evicted") == 1
        r.clock.advance(61.0)
        await r.store(23)
        assert "(20 times)" in caplog.text
        r.shelf.broken.clear()


async def test_a_lookup_answered_before_a_delete_brings_nothing_back() -> None:
    """An answer that is older than a delete or a store is no news to the index."""
    async with rig(Shelf(shared=True)) as r:
        await r.store(0, 1)
        look = asyncio.create_task(_late_lookup(r, 0, 1, 2))
        await asyncio.sleep(0)
        await r.tier.delete([make_object(0).key])
        await r.store(2)
        await look
        assert {entry.key for entry in r.tier.catalogue} == set(r.shelf.objects)


async def test_what_is_distrusted_is_deleted() -> None:
    """An object whose bytes turned out wrong goes, is counted, and can be stored anew."""
    async with rig() as r:
        await r.store(0, 1)
        r.tier.distrust([make_object(0).key])
        await r.assert_exact()
        assert r.there == [1]
        assert r.left == {"corrupt": 1}
        assert await r.store(0) == [OK]
        await r.assert_exact()
        assert r.there == [0, 1]


async def test_hints_decide_who_goes() -> None:
    """What is hinted to matter stays, what is hinted not to matter goes; both fade."""
    async with rig(objects=3, eviction="cost-aware") as r:
        await r.store(0, 1, 2)
        r.tier.hint([make_object(0).key.chunk], 16.0, 100.0)
        r.tier.hint([make_object(2).key.chunk], 0.1, 100.0)
        await r.store(3)
        assert r.there == [0, 1, 3]
        await r.store(4)
        assert r.there == [0, 3, 4]
        r.clock.advance(100.0)
        await r.tier.settle()
        for _ in range(3):
            await r.found(3, 4)
        r.clock.advance(100.0)
        await r.store(5)
        assert r.there == [3, 4, 5]


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost-aware"])
async def test_a_long_run_ends_where_it_began(eviction: str) -> None:
    """Thousands of operations, many of them cancelled somewhere: nothing stays leased, reserved or
    being read, the index is exact, and what is there is found."""
    chance = random.Random(eviction)
    async with rig(objects=8, eviction=eviction, tenant_quota_bytes=6 * SIZE) as r:
        for _ in range(600):
            numbers = chance.sample(range(16), chance.randint(1, 4))
            tenant = chance.choice([ANN, BOB])
            key = make_object(numbers[0]).key
            works: list[Callable[[], Any]] = [
                partial(r.store, *numbers, tenant=tenant),
                partial(r.found, *numbers),
                partial(_load, r, numbers[0]),
                partial(r.tier.delete, [key]),
            ]
            work = chance.choice(works)()
            await step_and_cancel(work, chance.choice([0, 1, 2, 3, 5, 8, 50, 50]))
            r.clock.advance(chance.choice([0.0, 1.0, 5.0]))
            assert len(r.shelf.objects) <= 8
        r.clock.advance(100.0)
        await r.assert_exact()
        catalogue = r.tier.catalogue
        catalogue.tick(r.clock.now())
        assert catalogue.holds.nbytes() == catalogue.holds.leases == catalogue.reserved == 0
        assert await r.found(*range(16)) == r.there


async def test_reads_share_the_budget_in_order() -> None:
    """Never more reads in the backend than the budget says; who came first is served first."""
    async with rig(load_operations=2) as r:
        await r.store(*range(6))
        running, peak, order = 0, 0, []

        async def count(read: Read) -> None:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            order.append(read.key)
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1

        r.shelf.before_read = count
        ended = await asyncio.gather(*(_load(r, number) for number in range(6)))
        assert ended == [OK] * 6
        assert peak <= 2
        assert order == [make_object(number).key for number in range(6)]


async def test_counts_are_exported() -> None:
    """What was evicted, what was dropped, and how full a tier is, are series by name."""
    metrics = PrometheusObserver()
    async with rig(objects=2) as r:
        await r.store(0, 1, 2)
        await r.store(3)
        for event in r.events:
            metrics(event)
    value = metrics.registry.get_sample_value
    assert value("cacheflow_evictions_total", {"tier": "t", "reason": "capacity"}) == 1
    assert value("cacheflow_store_dropped_total", {"tier": "t", "reason": "leased"}) == 1
    assert value("cacheflow_tier_used_bytes", {"tier": "t"}) == 2 * SIZE
    assert value("cacheflow_tier_capacity_bytes", {"tier": "t"}) == 2 * SIZE


async def _load(r: Any, number: int) -> TransferStatus:
    stored = make_object(number)
    read = Read(stored.key, 0, aligned_buffer(len(stored.data)))
    [result] = [result async for result in r.tier.load([read])]
    assert isinstance(result.status, TransferStatus)
    return result.status


async def _late_lookup(r: Any, *numbers: int) -> None:
    """The backend answers at once; the tier hears of it later."""
    answer = r.shelf.lookup

    async def late(keys: Any) -> Any:
        found = await answer(keys)
        for _ in range(20):
            await asyncio.sleep(0)
        return found

    r.shelf.lookup = late
    await r.found(*numbers)


async def _wait(gate: asyncio.Event) -> None:
    await gate.wait()

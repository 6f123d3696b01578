"""Leases and slots to be filled: who may touch what, until when, and what they keep alive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.pool.grants import Grants
from cacheflow.pool.slots import Arena, Arrival, Slot
from cacheflow.testing.objects import make_object
from cacheflow.types import TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZE = make_object(1).info.nbytes


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    arena = Arena(4 * SIZE)
    yield arena
    for slot in arena.slots():  # what the tests still hold: closing would wait for it
        while slot.hold.in_flight:
            slot.hold.release()
    await arena.aclose()


async def put(arena: Arena, number: int) -> Slot:
    """An object whose bytes have come."""
    loop = asyncio.get_running_loop()
    stored = make_object(number)
    arrival = Arrival(stored.info, (), loop.create_future(), loop.create_future())
    storing = asyncio.create_task(arena.store([arrival]))
    slot = await asyncio.wait_for(arrival.opened, 5.0)
    slot.lease.view[:] = stored.data
    arrival.filled.set_result(True)
    [result] = await storing
    assert result.status is TransferStatus.OK
    return slot


async def test_a_leased_slot_outlives_its_object(arena: Arena) -> None:
    """What is deleted while it is leased keeps its bytes until the lease is released; then its
    memory is used again."""
    grants = Grants()
    slots = [await put(arena, number) for number in range(4)]
    grants.lease("one", slots[0], 10.0)
    await arena.delete([slot.info.key for slot in slots[:1]])
    assert bytes(slots[0].lease.view) == make_object(0).data
    loop = asyncio.get_running_loop()
    arrival = Arrival(make_object(9).info, (), loop.create_future(), loop.create_future())
    [full] = await arena.store([arrival])
    assert full.status is TransferStatus.FULL
    grants.release("one", slots[0].generation)
    assert (await put(arena, 9)).offset == slots[0].offset


async def test_leases_are_counted_and_end(arena: Arena) -> None:
    """Two leases need two releases; a lease that is over is gone, also for transport threads."""
    grants = Grants()
    slot = await put(arena, 1)
    gen = slot.generation
    assert grants.lease("one", slot, 10.0)
    assert not grants.lease("one", slot, 20.0)
    grants.release("one", gen)
    assert grants.leases == 1
    hold = grants.enter("one", gen, slot.offset, SIZE, writing=False)
    assert hold is not None
    assert not grants.expired(19.0)
    assert grants.leases == 1
    grants.expired(20.0)
    assert (grants.leases, slot.hold.in_flight) == (0, 1)
    assert grants.enter("one", gen, slot.offset, SIZE, writing=False) is None
    hold.release()
    assert slot.hold.in_flight == 0


@pytest.mark.parametrize(
    ("client", "generation", "offset", "nbytes", "writing"),
    [
        ("other", 0, 0, 1, False),
        ("one", 1, 0, 1, False),
        ("one", 0, -1, 1, False),
        ("one", 0, 0, SIZE + 1, False),
        ("one", 0, SIZE, 1, False),
        ("one", 0, 0, -1, False),
        ("one", 0, 0, 1, True),
    ],
)
async def test_nobody_enters_without_a_grant(
    arena: Arena, client: str, generation: int, offset: int, nbytes: int, writing: bool
) -> None:
    """Another client, another generation, a range that reaches out of the slot, writing with a
    lease to read: none of them gets in, and nothing is held."""
    grants = Grants()
    await put(arena, 3)
    slot = await put(arena, 1)
    grants.lease("one", slot, 10.0)
    where = slot.offset + offset
    found = grants.enter(client, slot.generation + generation, where, nbytes, writing=writing)
    assert found is None
    assert slot.hold.in_flight == 1


async def test_the_lease_of_lookups_is_one_of_its_own(arena: Arena) -> None:
    """Lookups renew one lease; releases of reads leave it alone, and it ends by itself."""
    grants = Grants()
    slot = await put(arena, 1)
    gen = slot.generation
    assert grants.lease("one", slot, 10.0, looked_up=True)
    assert not grants.lease("one", slot, 20.0, looked_up=True)
    assert not grants.lease("one", slot, 20.0)
    assert grants.in_use == 1
    grants.release("one", gen)
    grants.release("one", gen)
    assert (grants.leases, grants.in_use) == (1, 0)
    grants.expired(19.0)
    assert grants.leases == 1
    grants.release("one", gen, looked_up=True)
    assert (grants.leases, slot.hold.in_flight) == (0, 0)


async def test_a_client_that_goes_leaves_nothing(arena: Arena) -> None:
    """All that a client had is free again, the slots it was filling are named, and others keep
    theirs."""
    told: list[int] = []
    grants = Grants(told.append)
    mine, both, filling = [await put(arena, number) for number in range(3)]
    grants.lease("one", mine, 10.0)
    grants.lease("one", both, 10.0)
    grants.lease("two", both, 10.0)
    grants.to_fill("one", filling, 10.0)
    assert grants.uncommitted_bytes == SIZE
    assert grants.dismiss("one") == [filling]
    assert (grants.leases, grants.uncommitted, grants.uncommitted_bytes) == (1, 0, 0)
    assert [slot.hold.in_flight for slot in (mine, both, filling)] == [0, 1, 0]
    assert told[-1] == 1


async def test_slots_to_be_filled_are_late_but_stay(arena: Arena) -> None:
    """A slot that was not committed in time is named once with its client and taken from nobody: he
    may be writing to it. Others need not wait for it any more."""
    grants = Grants()
    slot = await put(arena, 1)
    grants.to_fill("one", slot, 5.0)
    assert grants.next_end() == 5.0
    assert [grant.client for grant in grants.expired(6.0)] == ["one"]
    assert grants.expired(7.0) == []
    assert (grants.next_end(), grants.uncommitted, grants.uncommitted_bytes) == (None, 1, 0)
    assert grants.enter("one", slot.generation, slot.offset, SIZE, writing=True) is not None
    assert grants.filled("one", slot.generation) is slot
    assert grants.filled("one", slot.generation) is None

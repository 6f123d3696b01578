"""Staging memory: leases never overlap, never outrun a cap, never come back under running I/O."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.memory import InFlight, Lease, StagingPool, buffer_from
from cacheflow.types import PAGE

CAPACITY = 64 * PAGE


class Leases(RuleBasedStateMachine):
    """Leases, holds and releases in any order against simple sums."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StagingPool(CAPACITY)
        self.pool.set_cap("capped", 16 * PAGE)
        self.open: list[Lease] = []
        self.hung: list[Lease] = []

    @rule(size=st.integers(1, 20 * PAGE), owner=st.sampled_from(["", "a", "capped"]))
    def lease(self, size: int, owner: str) -> None:
        try:
            lease = self.pool.try_lease(size, owner)
        except CapacityError:
            assert owner == "capped"
            assert size > 16 * PAGE
            return
        if lease is not None:
            assert len(lease.view) == size
            assert lease.buffer.address % PAGE == 0
            self.open.append(lease)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), busy=st.booleans())
    def release(self, data: st.DataObject, busy: bool) -> None:
        lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if busy:
            lease.hold.acquire()
            self.hung.append(lease)
        lease.release()
        lease.release()

    @precondition(lambda self: self.hung)
    @rule(data=st.data())
    def io_ends(self, data: st.DataObject) -> None:
        self.hung.pop(data.draw(st.integers(0, len(self.hung) - 1))).hold.release()

    @invariant()
    def sums_are_right(self) -> None:
        def size(leases: list[Lease]) -> int:
            return sum(-(-len(lease.view) // PAGE) * PAGE for lease in leases)

        assert self.pool.leased_bytes == size(self.open)
        assert self.pool.quarantined_bytes() == size(self.hung)
        assert self.pool.free_bytes == CAPACITY - size(self.open) - size(self.hung)
        capped = [lease for lease in self.open + self.hung if lease.owner == "capped"]
        assert size(capped) <= 16 * PAGE

    @invariant()
    def nothing_overlaps(self) -> None:
        ranges = sorted(
            (lease.buffer.address, lease.buffer.address + len(lease.view))
            for lease in self.open + self.hung
        )
        for (_, stop), (start, _) in itertools.pairwise(ranges):
            assert stop <= start

    def teardown(self) -> None:
        for lease in self.hung:
            lease.hold.release()
        for lease in self.open:
            lease.release()
        assert self.pool.free_bytes == CAPACITY
        whole = self.pool.try_lease(CAPACITY)
        assert whole is not None, "free pieces were not joined again"


TestLeases = Leases.TestCase


async def test_waiters_are_served_in_order() -> None:
    """A small lease does not overtake a large one that waits longer."""
    pool = StagingPool(4 * PAGE)
    first = pool.try_lease(4 * PAGE)
    assert first is not None
    large = asyncio.ensure_future(pool.lease(3 * PAGE))
    small = asyncio.ensure_future(pool.lease(2 * PAGE))
    await asyncio.sleep(0)
    assert pool.try_lease(1) is None
    first.release()
    (await large).release()
    (await small).release()
    assert pool.free_bytes == pool.capacity


async def test_an_owner_at_its_cap_does_not_hold_up_others() -> None:
    """One hung tier cannot starve the rest."""
    pool = StagingPool(8 * PAGE)
    pool.set_cap("hung", 2 * PAGE)
    stuck = pool.try_lease(2 * PAGE, "hung")
    assert stuck is not None
    waiting = asyncio.ensure_future(pool.lease(PAGE, "hung"))
    await asyncio.sleep(0)
    other = await pool.lease(4 * PAGE, "other")
    other.release()
    assert not waiting.done()
    stuck.release()
    (await waiting).release()


@pytest.mark.parametrize("granted_first", [False, True])
async def test_a_cancelled_waiter_leaves_nothing(granted_first: bool) -> None:
    """Cancelled while waiting, or in the very moment of being granted."""
    pool = StagingPool(2 * PAGE)
    held = pool.try_lease(2 * PAGE)
    assert held is not None
    task = asyncio.ensure_future(pool.lease(PAGE))
    await asyncio.sleep(0)
    if granted_first:
        held.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.release()
    assert pool.free_bytes == pool.capacity


async def test_memory_under_io_comes_back_when_the_io_ends_on_another_thread() -> None:
    """Quarantined until then, and a waiter gets it afterwards."""
    pool = StagingPool(PAGE)
    lease = pool.try_lease(PAGE, "nvme")
    assert lease is not None
    lease.hold.acquire()
    lease.release()
    assert pool.quarantined_bytes("nvme") == PAGE
    waiting = asyncio.ensure_future(pool.lease(PAGE))
    await asyncio.sleep(0)
    assert not waiting.done()
    thread = threading.Thread(target=lease.hold.release)
    thread.start()
    (await waiting).release()
    thread.join()
    assert pool.quarantined_bytes() == 0


async def test_what_can_never_be_granted_fails_at_once() -> None:
    """Larger than the pool or the owner's cap: CapacityError that names the setting."""
    pool = StagingPool(2 * PAGE)
    pool.set_cap("x", PAGE)
    with pytest.raises(CapacityError, match="staging_bytes"):
        await pool.lease(3 * PAGE)
    with pytest.raises(CapacityError, match="for x"):
        await pool.lease(2 * PAGE, "x")


async def test_closing_is_bounded_and_never_frees_memory_under_io(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With I/O hung, close returns, says so, and leaves the memory alone."""
    pool = StagingPool(PAGE)
    lease = pool.try_lease(PAGE)
    assert lease is not None
    lease.hold.acquire()
    lease.release()
    async with asyncio.timeout(5):
        await pool.aclose()
    assert "left to hung I/O" in caplog.text
    lease.view[:] = b"x" * PAGE
    with pytest.raises(ClosedError):
        pool.try_lease(1)
    lease.hold.release()


async def test_closing_fails_waiters() -> None:
    """Nobody waits for ever on a closed pool."""
    pool = StagingPool(PAGE)
    held = pool.try_lease(PAGE)
    assert held is not None
    waiting = asyncio.ensure_future(pool.lease(PAGE))
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(ClosedError):
        await waiting
    held.release()


def test_a_hold_cannot_be_released_twice() -> None:
    """A backend that releases too often is told."""
    hold = InFlight()
    hold.acquire()
    hold.release()
    with pytest.raises(RuntimeError, match="more often"):
        hold.release()


def test_parts_share_the_hold_and_stay_inside() -> None:
    """A part is a window on the lease."""
    pool = StagingPool(4 * PAGE)
    lease = pool.try_lease(2 * PAGE)
    assert lease is not None
    part = lease.part(PAGE, PAGE)
    assert part.address == lease.buffer.address + PAGE
    assert part.hold is lease.hold
    with pytest.raises(ValueError, match="not inside"):
        lease.part(PAGE, 2 * PAGE)


def test_caller_memory_as_a_buffer() -> None:
    """bytes are copied, a bytearray is used as it is."""
    data = bytearray(b"abcd")
    buffer = buffer_from(data)
    assert buffer.view is not None
    buffer.view[0] = ord("z")
    assert data == b"zbcd"
    assert bytes(buffer_from(b"xy").view or b"") == b"xy"

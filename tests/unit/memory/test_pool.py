"""Staging memory: leases never overlap, never outrun a cap, never come back under running I/O."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.memory import InFlight, Lease, StagingPool, buffer_from
from cacheflow.types import PAGE, MemoryKind

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


@pytest.mark.parametrize("huge", [False, True])
def test_memory_that_nobody_has_is_refused(huge: bool) -> None:
    """With the number of bytes, for a person who wrote TiB for GiB."""
    with pytest.raises(ConfigError, match=f"{1 << 60} bytes"):
        StagingPool(1 << 60, pin=False, huge=huge)


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


async def test_nobody_overtakes_a_waiter_that_only_waits_for_room() -> None:
    """Neither by being small, nor because the waiter's owner has a cap that it is far from."""
    pool = StagingPool(4 * PAGE)
    pool.set_cap("nvme", 4 * PAGE)
    held = [pool.try_lease(PAGE) for _ in range(4)]
    large = asyncio.ensure_future(pool.lease(4 * PAGE, "nvme"))
    await asyncio.sleep(0)
    for lease in held:
        assert lease is not None
        assert pool.try_lease(PAGE, "other") is None
        lease.release()
    (await large).release()


async def test_an_owner_is_served_in_its_own_order() -> None:
    """At its cap, a small lease of the same owner does not overtake its large one for ever."""
    pool = StagingPool(8 * PAGE)
    pool.set_cap("x", 3 * PAGE)
    held = [pool.try_lease(PAGE, "x") for _ in range(3)]
    large = asyncio.ensure_future(pool.lease(3 * PAGE, "x"))
    small = asyncio.ensure_future(pool.lease(PAGE, "x"))
    await asyncio.sleep(0)
    for lease in held:
        assert lease is not None
        assert not small.done()
        assert pool.try_lease(PAGE, "x") is None
        lease.release()
        await asyncio.sleep(0)
    (await large).release()
    (await small).release()
    assert pool.free_bytes == pool.capacity


async def test_a_changed_cap_reaches_the_waiters() -> None:
    """Lowered below a wait, the wait fails and names the cap; raised, it is served."""
    pool = StagingPool(8 * PAGE)
    pool.set_cap("x", 4 * PAGE)
    held = pool.try_lease(4 * PAGE, "x")
    assert held is not None
    large = asyncio.ensure_future(pool.lease(3 * PAGE, "x"))
    small = asyncio.ensure_future(pool.lease(PAGE, "x"))
    await asyncio.sleep(0)
    pool.set_cap("x", 2 * PAGE)
    with pytest.raises(CapacityError, match="for x"):
        await large
    assert not small.done()
    pool.set_cap("x", 5 * PAGE)
    (await small).release()
    held.release()


async def test_cancelling_wins_over_closing() -> None:
    """A waiter cancelled in the moment of closing is cancelled, not told of the close."""
    pool = StagingPool(PAGE)
    held = pool.try_lease(PAGE)
    assert held is not None
    waiting = asyncio.ensure_future(pool.lease(1))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(pool.aclose())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.release()
    await closing


@pytest.mark.parametrize("seed", range(20))
async def test_leases_waits_and_cancellations_at_random(seed: int) -> None:
    """Whatever is cancelled when, and on whatever thread I/O ends: nothing is left behind, no
    wake-up is lost, no cap is broken."""
    chance = random.Random(seed)
    pool = StagingPool(16 * PAGE)
    pool.set_cap("b", 5 * PAGE)
    io = ThreadPoolExecutor(2)

    async def user(owner: str) -> None:
        limit = 5 if owner == "b" else 16
        for _ in range(8):
            with await pool.lease(chance.randint(1, limit) * PAGE, owner) as lease:
                assert pool._used["b" if owner == "b" else owner] <= limit * PAGE
                if chance.random() < 0.5:
                    lease.hold.acquire()
                    io.submit(lease.hold.release)
                await asyncio.sleep(0)

    async with asyncio.timeout(20):
        tasks = [asyncio.ensure_future(user(chance.choice("abc"))) for _ in range(12)]
        for task in chance.sample(tasks, 4):
            for _ in range(chance.randint(0, 6)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    io.shutdown()
    assert {type(r) for r in results if r is not None} <= {asyncio.CancelledError}
    assert pool.free_bytes == pool.capacity
    assert not pool._waiters
    assert not any(pool._used.values())
    await pool.aclose()


async def test_memory_left_to_hung_io_is_freed_when_that_ends_after_all() -> None:
    """Even from a thread; closing again changes nothing."""
    pool = StagingPool(2 * PAGE)
    lease, other = pool.try_lease(PAGE), pool.try_lease(PAGE)
    assert lease is not None
    assert other is not None
    lease.hold.acquire()
    lease.release()
    await pool.aclose()
    await pool.aclose()
    assert pool.quarantined_bytes() == PAGE
    other.release()
    assert pool.view.nbytes == 2 * PAGE
    await asyncio.to_thread(lease.hold.release)
    assert pool.quarantined_bytes() == 0
    with pytest.raises(ValueError, match="released"):
        pool.view[0]


def test_io_that_outlives_its_loop_gives_its_memory_back() -> None:
    """The next loop finds it free."""
    pool = StagingPool(PAGE)
    lease = pool.try_lease(PAGE)
    assert lease is not None

    async def leave_waiting() -> None:
        lease.hold.acquire()
        lease.release()
        waiting = asyncio.ensure_future(pool.lease(PAGE))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(leave_waiting())
    lease.hold.release()

    async def again() -> None:
        (await pool.lease(PAGE)).release()

    asyncio.run(again())
    assert pool.free_bytes == PAGE


def test_what_cannot_be_pinned_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for expressly, pinning is not silently left out; by default it is optional."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ConfigError, match="CUDA"):
        StagingPool(PAGE, pin=True)
    assert StagingPool(PAGE).kind is MemoryKind.PAGEABLE


def test_memory_does_not_import_torch() -> None:
    """Importing it takes seconds; a store's command line needs none of it."""
    code = "import sys, cacheflow.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    with pytest.raises(ValueError, match="not inside"):
        lease.part(-2 * PAGE, PAGE)


def test_caller_memory_as_a_buffer() -> None:
    """bytes are copied, a bytearray is used as it is."""
    data = bytearray(b"abcd")
    buffer = buffer_from(data)
    assert buffer.view is not None
    buffer.view[0] = ord("z")
    assert data == b"zbcd"
    assert bytes(buffer_from(b"xy").view or b"") == b"xy"

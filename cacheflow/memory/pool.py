"""The staging pool: leases of aligned host memory that are never reused under running I/O.

One arena, pinned when CUDA is there. A lease given back while I/O is in flight on it goes into
quarantine and returns by itself when that I/O ends. Owners (channels) can be capped, so that one
hung tier cannot take everything. Leases are asked for on one loop; holds may end on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.memory.arena import FreeList
from cacheflow.memory.hold import InFlight
from cacheflow.memory.pages import HostPages
from cacheflow.types import PAGE, Buffer

__all__ = ["Lease", "StagingPool"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 1.0
"""How long closing waits for quarantined I/O before it leaves the arena to it."""


class Lease:
    """``size`` bytes of a pool, 4 KiB-aligned. Give it back with :meth:`release` or ``with``."""

    __slots__ = ("_offset", "_pool", "_released", "_reserved", "buffer", "hold", "owner", "view")

    def __init__(
        self, pool: StagingPool, offset: int, size: int, reserved: int, owner: str
    ) -> None:
        self._pool = pool
        self._offset = offset
        self._reserved = reserved
        self._released = False
        self.owner = owner
        self.hold = InFlight()
        self.view = pool.view[offset : offset + size]
        self.buffer = Buffer(pool.address + offset, size, pool.kind, self.view, self.hold)

    def part(self, offset: int, nbytes: int) -> Buffer:
        """Bytes ``[offset, offset + nbytes)`` of the lease as a buffer under the same hold."""
        view = self.view[offset : offset + nbytes]
        if offset < 0 or len(view) != nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside the lease")
        address = self.buffer.address + offset
        return Buffer(address, nbytes, self.buffer.kind, view, self.hold)

    def release(self) -> None:
        """Give the memory back, at once or when the I/O in flight on it has ended. Idempotent."""
        if not self._released:
            self._released = True
            self._pool._give_back(self, self._offset, self._reserved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Waiter:
    size: int
    owner: str
    future: asyncio.Future[Lease]


class StagingPool:
    """``capacity`` bytes of page-aligned host memory (rounded up to 4 KiB).

    ``huge``: in huge pages as far as there are any; ``pages`` says what came of it.

    Raises:
        ConfigError: ``pin`` is True and the memory cannot be pinned (None: pinned if possible).
        ValueError: ``capacity`` is not positive.
    """

    def __init__(self, capacity: int, *, pin: bool | None = None, huge: bool = False) -> None:
        if capacity <= 0:
            raise ValueError(f"a staging pool needs at least one byte, got {capacity}")
        self.capacity = _round_up(capacity)
        self._pages = HostPages(self.capacity, pin=pin, huge=huge)
        self.pages = self._pages.pages
        self.view = self._pages.view
        self.address = self._pages.address
        self.kind = self._pages.kind
        self.arena = Buffer(self.address, self.capacity, self.kind, self.view, InFlight())
        """What leases are parts of, to be told to whoever registers memory with hardware."""
        self._lock = threading.Lock()
        """Guards the sums, the free list and the queue of waiters: I/O ends on any thread."""
        self._free = FreeList(self.capacity)
        self._caps: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}
        self._waiters: deque[_Waiter] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the waiters; None while nobody has ever waited."""
        self._closed = False
        self._emptied: asyncio.Event | None = None
        """While closing: set when the quarantine is empty."""

    @property
    def free_bytes(self) -> int:
        """Bytes that could be leased (in pieces, perhaps)."""
        return self._free.free

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased and not given back."""
        with self._lock:
            return self.capacity - self._free.free - sum(self._quarantined.values())

    def quarantined_bytes(self, owner: str | None = None) -> int:
        """Bytes given back with I/O still in flight on them (after closing: left to it)."""
        with self._lock:
            if owner is not None:
                return self._quarantined.get(owner, 0)
            return sum(self._quarantined.values())

    def set_cap(self, owner: str, nbytes: int | None) -> None:
        """``owner`` may hold at most ``nbytes``, quarantine included; None: as much as there is.

        What it holds already stays; its waiters that could never be served any more fail.
        """
        with self._lock:
            if nbytes is None:
                self._caps.pop(owner, None)
                nbytes = self.capacity
            else:
                self._caps[owner] = nbytes
            hopeless = [w for w in self._waiters if w.owner == owner and _round_up(w.size) > nbytes]
            for waiter in hopeless:
                self._waiters.remove(waiter)
        for waiter in hopeless:
            if not waiter.future.done():
                waiter.future.set_exception(self._too_large(waiter.size, waiter.owner))
        self._wake()

    def try_lease(self, nbytes: int, owner: str = "") -> Lease | None:
        """A lease now, or None if there is no room or others are waiting for it.

        Raises:
            CapacityError: it could never be granted.
            ClosedError: the pool was closed.
        """
        self._check(nbytes, owner)
        with self._lock:
            return self._take_in_turn(nbytes, owner)

    async def lease(self, nbytes: int, owner: str = "") -> Lease:
        """A lease, in the order of asking (an owner at its cap does not hold up the others).

        Raises:
            CapacityError: it could never be granted.
            ClosedError: the pool was closed.
        """
        self._check(nbytes, owner)
        loop = asyncio.get_running_loop()
        with self._lock:  # one step: I/O that ends between trying and queueing would wake nobody
            if (lease := self._take_in_turn(nbytes, owner)) is not None:
                return lease
            self._loop = loop
            waiter = _Waiter(nbytes, owner, loop.create_future())
            self._waiters.append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    async def aclose(self) -> None:
        """Refuse new leases and free the arena once every lease is back. Idempotent, bounded.

        Memory that hung I/O may yet write is left to it (and said so) rather than freed; it is
        freed if that I/O ever ends.
        """
        if self._closed:
            return
        self._closed = True
        self._loop = asyncio.get_running_loop()
        self._emptied = asyncio.Event()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(ClosedError("the staging pool was closed"))
        if self.quarantined_bytes():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), _CLOSE_SECONDS)
        if left := self.quarantined_bytes():
            _log.error("%d staging bytes are left to hung I/O", left)
        with self._lock:
            if self._free.free < self.capacity:
                _LEFT.add(self)
                return
        self._pages.free()

    def _check(self, nbytes: int, owner: str) -> None:
        if self._closed:
            raise ClosedError("the staging pool was closed")
        if nbytes <= 0:
            raise ValueError(f"a lease needs at least one byte, got {nbytes}")
        if _round_up(nbytes) > self._limit(owner):
            raise self._too_large(nbytes, owner)

    def _limit(self, owner: str) -> int:
        return min(self.capacity, self._caps.get(owner, self.capacity))

    def _too_large(self, nbytes: int, owner: str) -> CapacityError:
        of = f" for {owner}" if owner in self._caps else ""
        return CapacityError(
            f"{nbytes} staging bytes were asked for, {self._limit(owner)} is all there is{of}: "
            "raise setting staging_bytes"
        )

    def _take_in_turn(self, nbytes: int, owner: str) -> Lease | None:
        """Not past the own owner's waiters, nor past those that only wait for room."""
        for waiter in self._waiters:
            its_turn = waiter.owner == owner or self._within_cap(waiter.size, waiter.owner)
            if its_turn and not waiter.future.done():
                return None
        return self._take(nbytes, owner)

    def _within_cap(self, nbytes: int, owner: str) -> bool:
        cap = self._caps.get(owner, self.capacity)
        return self._used.get(owner, 0) + _round_up(nbytes) <= cap

    def _take(self, nbytes: int, owner: str) -> Lease | None:
        size = _round_up(nbytes)
        if not self._within_cap(nbytes, owner) or (offset := self._free.take(size)) is None:
            return None
        self._used[owner] = self._used.get(owner, 0) + size
        return Lease(self, offset, nbytes, size, owner)

    def _give_back(self, lease: Lease, offset: int, size: int) -> None:
        owner = lease.owner
        with self._lock:
            self._quarantined[owner] = self._quarantined.get(owner, 0) + size

        def ended() -> None:  # at once, or on the thread on which the last I/O ends
            with self._lock:
                self._quarantined[owner] -= size
                self._used[owner] -= size
                if not self._used[owner]:  # owners come and go
                    del self._used[owner], self._quarantined[owner]
                self._free.give(offset, size)
                whole = self._free.free == self.capacity
            self._wake()
            if whole and self in _LEFT:
                _LEFT.discard(self)
                self._pages.free()

        lease.hold.when_idle(ended)

    def _wake(self) -> None:
        """Serve the waiters, on their loop. From any thread."""
        loop = self._loop
        if loop is None or not (self._waiters or self._emptied):
            return
        if _running_loop() is loop:
            self._serve()
            return
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
            loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        """Grant waiters in order; only those held up by their owner's cap are passed over."""
        with self._lock:
            granted = self._grants()
        for waiter, lease in granted:
            waiter.future.set_result(lease)
        if self._emptied is not None and not self.quarantined_bytes():
            self._emptied.set()

    def _grants(self) -> list[tuple[_Waiter, Lease]]:
        granted: list[tuple[_Waiter, Lease]] = []
        passed: set[str] = set()
        for waiter in list(self._waiters):
            if waiter.future.done():  # cancelled; its task takes it out of the queue
                continue
            if waiter.owner in passed or not self._within_cap(waiter.size, waiter.owner):
                passed.add(waiter.owner)
                continue
            lease = self._take(waiter.size, waiter.owner)
            if lease is None:
                break
            self._waiters.remove(waiter)
            granted.append((waiter, lease))
        return granted

    def _withdraw(self, waiter: _Waiter) -> None:
        """A cancelled waiter: out of the queue, or its grant given back."""
        with self._lock:
            queued = waiter in self._waiters
            if queued:
                self._waiters.remove(waiter)
        future = waiter.future
        if not queued and future.done() and not future.cancelled() and not future.exception():
            future.result().release()
        self._wake()


_LEFT: Final[set[StagingPool]] = set()
"""Closed pools with memory that is not back yet: alive as long as I/O may still touch it."""


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

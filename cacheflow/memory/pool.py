"""The staging pool: leases of aligned host memory that are never reused under running I/O.

One arena, pinned when CUDA is there. A lease given back while I/O is in flight on it goes into
quarantine and returns by itself when that I/O ends. Owners (channels) can be capped, so that one
hung tier cannot take everything. Loop-owned, except that holds end on any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.memory.arena import FreeList
from cacheflow.memory.hold import InFlight
from cacheflow.types import PAGE, Buffer, MemoryKind

if TYPE_CHECKING:
    from cacheflow.types import Hold

__all__ = ["Lease", "StagingPool", "buffer_from"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 1.0
"""How long closing waits for quarantined I/O before it leaves the arena to it."""


def buffer_from(
    data: bytes | bytearray | memoryview | mmap.mmap, hold: Hold | None = None
) -> Buffer:
    """A pageable :class:`Buffer` over caller-owned memory (bytes are copied, to be addressable)."""
    view = memoryview(bytearray(data) if isinstance(data, bytes) else data).cast("B")
    array = (ctypes.c_char * len(view)).from_buffer(view)
    return Buffer(ctypes.addressof(array), len(view), MemoryKind.PAGEABLE, view, hold or InFlight())


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
        if len(view) != nbytes:
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


@dataclass(slots=True)
class _Waiter:
    size: int
    owner: str
    future: asyncio.Future[Lease]


class StagingPool:
    """``capacity`` bytes of page-aligned host memory (rounded up to 4 KiB)."""

    def __init__(self, capacity: int, *, pin: bool | None = None) -> None:
        if capacity <= 0:
            raise ValueError(f"a staging pool needs at least one byte, got {capacity}")
        self.capacity = _round_up(capacity)
        self._map = mmap.mmap(-1, self.capacity)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pinned = _pin(self.address, self.capacity) if pin is not False else False
        self.kind = MemoryKind.PINNED if self._pinned else MemoryKind.PAGEABLE
        self._free = FreeList(self.capacity)
        self._caps: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}
        self._waiters: deque[_Waiter] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
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
        return self.capacity - self._free.free - self.quarantined_bytes()

    def quarantined_bytes(self, owner: str | None = None) -> int:
        """Bytes given back with I/O still in flight on them."""
        if owner is not None:
            return self._quarantined.get(owner, 0)
        return sum(self._quarantined.values())

    def set_cap(self, owner: str, nbytes: int) -> None:
        """``owner`` may hold at most ``nbytes``, quarantine included."""
        self._caps[owner] = nbytes

    def try_lease(self, nbytes: int, owner: str = "") -> Lease | None:
        """A lease now, or None if there is no room or others are waiting for it.

        Raises:
            CapacityError: it could never be granted.
            ClosedError: the pool was closed.
        """
        self._check(nbytes, owner)
        if any(self._caps.get(w.owner) is None for w in self._waiters):
            return None
        return self._take(nbytes, owner)

    async def lease(self, nbytes: int, owner: str = "") -> Lease:
        """A lease, in the order of asking (an owner at its cap does not hold up the others).

        Raises:
            CapacityError: it could never be granted.
            ClosedError: the pool was closed.
        """
        lease = self.try_lease(nbytes, owner)
        if lease is not None:
            return lease
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(nbytes, owner, self._loop.create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().release()
            self._serve()
            raise

    async def aclose(self) -> None:
        """Refuse new leases and free the arena, unless I/O is still in flight on it.

        Memory that hung I/O may yet write is left to it (and said so) rather than freed.
        """
        self._closed = True
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(ClosedError("the staging pool was closed"))
        if self.quarantined_bytes():
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), _CLOSE_SECONDS)
        if self.quarantined_bytes():
            _log.error("%d staging bytes are left to hung I/O", self.quarantined_bytes())
            _LEFT_TO_IO.append(self._map)
        elif self._pinned:
            _unpin(self.address)
            self._pinned = False

    def _check(self, nbytes: int, owner: str) -> None:
        if self._closed:
            raise ClosedError("the staging pool was closed")
        if nbytes <= 0:
            raise ValueError(f"a lease needs at least one byte, got {nbytes}")
        limit = min(self.capacity, self._caps.get(owner, self.capacity))
        if _round_up(nbytes) > limit:
            raise CapacityError(
                f"{nbytes} staging bytes were asked for, {limit} is all there is"
                f"{f' for {owner}' if owner in self._caps else ''}: raise setting staging_bytes"
            )

    def _take(self, nbytes: int, owner: str) -> Lease | None:
        size = _round_up(nbytes)
        used = self._used.get(owner, 0)
        if used + size > self._caps.get(owner, self.capacity):
            return None
        offset = self._free.take(size)
        if offset is None:
            return None
        self._used[owner] = used + size
        return Lease(self, offset, nbytes, size, owner)

    def _give_back(self, lease: Lease, offset: int, size: int) -> None:
        if lease.hold.in_flight == 0:
            self._freed(lease.owner, offset, size)
            return
        self._quarantined[lease.owner] = self._quarantined.get(lease.owner, 0) + size
        loop = _running_loop() or self._loop

        def ended() -> None:
            self._quarantined[lease.owner] -= size
            self._freed(lease.owner, offset, size)
            if self._emptied is not None and not self.quarantined_bytes():
                self._emptied.set()

        def from_any_thread() -> None:
            if loop is None or loop.is_closed():
                ended()
            else:
                loop.call_soon_threadsafe(ended)

        lease.hold.when_idle(from_any_thread)

    def _freed(self, owner: str, offset: int, size: int) -> None:
        self._free.give(offset, size)
        self._used[owner] -= size
        self._serve()

    def _serve(self) -> None:
        """Grant waiters in order; only those held up by their own cap are passed over."""
        for waiter in list(self._waiters):
            if waiter.future.done():
                self._waiters.remove(waiter)
                continue
            lease = self._take(waiter.size, waiter.owner)
            if lease is not None:
                self._waiters.remove(waiter)
                waiter.future.set_result(lease)
            elif self._caps.get(waiter.owner) is None:
                return


_LEFT_TO_IO: Final[list[mmap.mmap]] = []
"""Arenas that hung I/O may still write: kept for the life of the process."""


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _pin(address: int, nbytes: int) -> bool:
    """Register the arena with CUDA where that is in use; pageable memory works everywhere.

    Importing torch takes seconds and pools are made on the loop: without torch there is no CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0


def _unpin(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)

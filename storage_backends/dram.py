"""The dram tier: whole objects in host memory, pinned when CUDA is in use. Bounded; never evicts.

What is stored is lent where it lies, or copied, on a few threads with the GIL released. Knows
nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from cacheflow.abc import StorageBackend
from cacheflow.errors import CapacityError, ClosedError
from cacheflow.memory import Lease, StagingPool
from cacheflow.storage_backends.checks import check_extents, check_reads, check_writes
from cacheflow.storage_backends.copying import Copies, Copy
from cacheflow.storage_backends.options import Options
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.types import Buffer, Capabilities, Lent, Loan, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, Extent, ObjectKey, Read, Write

__all__ = ["DramBackend", "DramOptions"]


class DramOptions(Options):
    """Options of the ``dram`` backend."""

    capacity_bytes: int = Field(default=1 << 30, gt=0)
    """Memory for objects, reserved at open and touched as it fills."""
    threads: int = Field(default=2, ge=1, le=64)


@dataclass(slots=True, eq=False)
class _Object:
    info: ChunkInfo
    lease: Lease
    """Its hold counts the reads that are copying out of it, and the loans."""
    nbytes: int
    view: memoryview
    """All of it, as it is lent."""
    lent: Lent | None = None
    """What was lent of it last: whoever restores the same prefix wants the same."""


class DramBackend(StorageBackend):
    """Objects live in one page-aligned arena; a replaced one stays until its readers are done."""

    name: ClassVar[str] = "dram"

    def __init__(self, options: DramOptions) -> None:
        self.capabilities = Capabilities(
            suggested_depth=options.threads, suggested_read_bytes=1 << 20
        )
        self._arena = StagingPool(options.capacity_bytes)
        self._threads = IoThreads(options.threads, "cacheflow-dram")
        self._objects: dict[ChunkKey, dict[ObjectKey, _Object]] = {}
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        return cls(DramOptions.parse(cls.name, options))

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        self._check()
        return [[o.info for o in self._objects.get(key, {}).values()] for key in keys]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._check()
        check_reads(reads)
        # Resolved and held before the first await: what is replaced meanwhile is still read whole.
        found = [(read, self._find(read.key)) for read in reads]
        copies = Copies(
            self._threads,
            [Copy(read, item.lease.buffer if item else None) for read, item in found],
        )
        given = 0
        try:
            copies.begin()
            while results := await copies.after(given):
                given += len(results)
                for result in results:
                    yield result
        finally:
            copies.leave()

    def borrow(self, extents: Sequence[Extent]) -> Loan:
        """See the contract. What is deleted or replaced while it is lent takes room until then."""
        self._check()
        check_extents(extents)
        parts = [self._lend(extent) for extent in extents]
        lent = [part.buffer for part in parts if part.buffer is not None]
        _acquire(lent)
        return Loan(parts, partial(_release, lent))

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """See the contract. One after another, so that a replaced object makes room for the next;
        while it is being replaced both need room."""
        self._check()
        check_writes(writes)
        left = deque(writes)
        for write in writes:
            _acquire(write.parts)
        results = []
        try:
            while left:
                self._check()
                results.append(await self._store(left.popleft()))
        finally:
            for write in left:
                _release(write.parts)
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        return [self._remove(key) for key in keys]

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        for shards in list(self._objects.values()):
            for item in list(shards.values()):
                yield item.info

    async def used_bytes(self) -> int:
        self._check()
        return sum(o.nbytes for shards in self._objects.values() for o in shards.values())

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._threads.aclose(1.0)
            for shards in self._objects.values():
                for item in shards.values():
                    item.lease.release()
            self._objects.clear()
            await self._arena.aclose()

    def _lend(self, extent: Extent) -> Lent:
        item = self._find(extent.key)
        if item is None:
            return Lent(extent, TransferStatus.MISSING)
        first, nbytes, lent = extent.offset, extent.nbytes, item.lent
        if lent is not None and lent.extent.offset == first and lent.extent.nbytes == nbytes:
            return lent
        if first + nbytes > item.nbytes:
            return Lent(extent, TransferStatus.SHORT)
        whole, view = item.lease.buffer, item.view[first : first + nbytes]
        buffer = Buffer(whole.address + first, nbytes, whole.kind, view, whole.hold)
        item.lent = Lent(extent, TransferStatus.OK, buffer)
        return item.lent

    async def _store(self, write: Write) -> TransferResult:
        """One write, whose parts are held; they are released when the copy has ended."""
        start = time.monotonic()
        lease = self._room_for(write)
        if not isinstance(lease, Lease):
            _release(write.parts)
            return TransferResult(write, TransferStatus.FULL, 0, time.monotonic() - start, lease)
        touched = (*write.parts, lease.buffer)
        lease.hold.acquire()

        def copy() -> None:
            try:
                at = lease.buffer.address
                for part in write.parts:
                    ctypes.memmove(at, part.address, part.nbytes)
                    at += part.nbytes
            finally:
                _release(touched)

        try:
            job = self._threads.start(copy, lambda: _release(touched))
        except ClosedError:
            _release(touched)
            lease.release()
            raise
        try:
            await asyncio.shield(job.done)
        except BaseException:
            self._threads.withdraw(job)
            lease.release()
            raise
        if self._closed:
            lease.release()
            raise ClosedError("the dram tier was closed")
        self._remove(write.info.key)
        item = _Object(write.info, lease, write.nbytes, lease.view.toreadonly())
        self._objects.setdefault(write.info.key.chunk, {})[write.info.key] = item
        seconds = time.monotonic() - start
        return TransferResult(write, TransferStatus.OK, write.nbytes, seconds)

    def _room_for(self, write: Write) -> Lease | CapacityError:
        with suppress(CapacityError):
            if (lease := self._arena.try_lease(write.nbytes)) is not None:
                return lease
        return CapacityError(
            f"dram tier: no room for {write.nbytes} bytes in {self._arena.capacity} "
            f"({self._arena.free_bytes} free); raise option capacity_bytes"
        )

    def _find(self, key: ObjectKey) -> _Object | None:
        shards = self._objects.get(key.chunk, {})
        for item in shards.values():
            if item.info.key is key:  # as a lookup gave it: cheaper than hashing it again
                return item
        return shards.get(key)

    def _remove(self, key: ObjectKey) -> bool:
        item = self._objects.get(key.chunk, {}).pop(key, None)
        if item is None:
            return False
        if not self._objects[key.chunk]:
            del self._objects[key.chunk]
        item.lease.release()
        return True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the dram tier is closed")


def _acquire(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.hold.acquire()


def _release(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.hold.release()

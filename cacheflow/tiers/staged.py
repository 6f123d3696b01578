"""Read your writes: chunks that wait to be stored are found, and loaded from where they wait.

A channel of its own to the restorer, as fast as memory, so that what is learned about the speed of
a tier stays true. Knows nothing of queues and tiers but which tier got a chunk in the end: who
looked a chunk up here and comes too late reads it there.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Self

from cacheflow.abc import StorageBackend
from cacheflow.tiers.ranks import rank_of
from cacheflow.types import Buffer, Capabilities, Lent, Loan, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from cacheflow.memory import Lease
    from cacheflow.tiers.ranks import Rank
    from cacheflow.types import ChunkInfo, ChunkKey, Extent, ObjectKey, Read, Write

__all__ = ["STAGED_CHANNEL", "Copy", "StagedCopies"]

STAGED_CHANNEL: Final = "staged"
"""What metrics and messages call it; no tier can have this name."""
_PATIENCE: Final = 0.05
"""A lookup waits at most this long for chunks that are just being copied out of the engine."""
_REMEMBERED: Final = 4096
"""Chunks of which is known which tier got them."""


@dataclass(slots=True, eq=False)
class Copy:
    """One sealed chunk in staging memory; given back when the last user has left."""

    write: Write
    lease: Lease
    users: int = 1
    """Who makes it is the first."""
    tier: str = ""
    """A tier that has it by now, as it is."""

    @property
    def rank(self) -> Rank:
        """How good it is."""
        info = self.write.info
        return rank_of(canonical=info.canonical, lossy=info.lossy)


class StagedCopies(StorageBackend):
    """The copies that wait, by key. ``settle`` is awaited before a lookup is answered.

    Only lookups, loads and loans are for everybody; who stages copies adds and removes them.
    Loop-owned but for the bytes, which one thread copies.
    """

    name: ClassVar[str] = STAGED_CHANNEL

    def __init__(self, tiers: Mapping[str, StorageBackend]) -> None:
        self.capabilities = Capabilities()
        self.settle: Callable[[Sequence[ChunkKey]], Awaitable[None]] | None = None
        self._tiers = tiers
        self._copies: dict[ChunkKey, Copy] = {}
        self._went: OrderedDict[ObjectKey, str] = OrderedDict()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-staged")

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        return cls({})

    # -- for who stages ------------------------------------------------------------------------

    def join(self, key: ChunkKey, rank: Rank) -> Copy | None:
        """The copy of ``key``, if it is at least as good as asked, with one user more."""
        copy = self._copies.get(key)
        if copy is None or copy.rank < rank:
            return None
        copy.users += 1
        return copy

    def add(self, copy: Copy) -> None:
        """``copy`` can be found from now on."""
        self._copies[copy.write.info.key.chunk] = copy

    def leave(self, copy: Copy) -> None:
        """A user is done with ``copy``; the last one gives the memory back (to I/O in flight)."""
        copy.users -= 1
        if copy.users:
            return
        key = copy.write.info.key
        if self._copies.get(key.chunk) is copy:
            del self._copies[key.chunk]
        if copy.tier:
            self._went[key] = copy.tier
            if len(self._went) > _REMEMBERED:
                self._went.popitem(last=False)
        copy.lease.release()

    # -- for everybody -------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        if self.settle is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self.settle(keys)
        found = [self._copies.get(key) for key in keys]
        return [() if copy is None else (copy.write.info,) for copy in found]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        start = time.monotonic()
        copying = [self._begin(read) for read in reads]
        try:
            for read, job in zip(reads, copying, strict=True):
                if job is None:
                    yield await self._from_tier(read)
                    continue
                await asyncio.wrap_future(job)
                seconds = time.monotonic() - start
                yield TransferResult(read, TransferStatus.OK, read.buffer.nbytes, seconds)
        finally:
            for job in copying:
                if job is not None:
                    job.cancel()

    def borrow(self, extents: Sequence[Extent]) -> Loan | None:
        """Whoever borrows is one more user. None if some of it has gone to its tier by now."""
        places = [self._place(extent) for extent in extents]
        copies = [place[0] for place in places if place is not None]
        if len(copies) < len(extents):
            return None
        for copy in copies:
            copy.users += 1

        def give_back() -> None:
            for copy in copies:
                self.leave(copy)

        return Loan([place[1] for place in places if place is not None], give_back)

    def _place(self, extent: Extent) -> tuple[Copy, Lent] | None:
        """Where the bytes lie; None if they do not lie in one piece of a copy."""
        copy, at = self._copies.get(extent.key.chunk), extent.offset
        if copy is None or copy.write.info.key != extent.key:
            return None
        for part in copy.write.parts:
            if at >= 0 and at + extent.nbytes <= part.nbytes and part.view is not None:
                view = part.view.toreadonly()[at : at + extent.nbytes]
                buffer = Buffer(part.address + at, extent.nbytes, part.kind, view, part.hold)
                return copy, Lent(extent, TransferStatus.OK, buffer)
            at -= part.nbytes
        return None

    def _begin(self, read: Read) -> Future[None] | None:
        """Begin to copy; both ends are held until that has ended or is known not to begin."""
        copy = self._copies.get(read.key.chunk)
        if copy is None or copy.write.info.key != read.key:
            return None
        holds = (copy.lease.hold, read.buffer.hold)
        for hold in holds:
            hold.acquire()
        job = self._copier.submit(_copy, copy.write, read)

        def ended(_: object) -> None:
            for hold in holds:
                hold.release()

        job.add_done_callback(ended)
        return job

    async def _from_tier(self, read: Read) -> TransferResult:
        """It was stored and given back since it was looked up."""
        found = None
        if (tier := self._tiers.get(self._went.get(read.key, ""))) is not None:
            async for result in tier.load([read]):
                found = result
        if found is not None:
            return found
        return TransferResult(read, TransferStatus.MISSING, 0, 0.0)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        raise NotImplementedError("copies are added by the saver only")

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        raise NotImplementedError("copies leave when they are stored")

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        for copy in list(self._copies.values()):
            yield copy.write.info

    async def used_bytes(self) -> int:
        return sum(copy.write.nbytes for copy in self._copies.values())

    async def aclose(self) -> None:
        self._copier.shutdown(wait=False, cancel_futures=True)


def _copy(write: Write, read: Read) -> None:
    """Bytes of an object in parts, from ``read.offset`` on, into the reader's buffer."""
    skip, at = read.offset, read.buffer.address
    end = at + read.buffer.nbytes
    for part in write.parts:
        nbytes = min(part.nbytes - skip, end - at)
        if nbytes > 0:
            ctypes.memmove(at, part.address + skip, nbytes)
            at += nbytes
        skip = max(skip - part.nbytes, 0)
    if at < end:
        raise ValueError(f"object of {write.nbytes} bytes ends before {read.offset} + the buffer")

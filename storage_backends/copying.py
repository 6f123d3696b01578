"""Loads out of host memory: copies by a few threads, with as little as possible around each.

What is done between two copies of 1 MiB finds cold caches and costs several times what it should,
and so does every turn of the event loop and every wait for the interpreter's lock: a thread copies
what it can get of a load, up to some MiB, before it does anything else about it. Copies cannot
hang, so results may wait for the last one of a load that is being copied; for I/O that can, there
is :func:`cacheflow.storage_backends.loading.load_on_threads`.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from cacheflow.storage_backends.threads import Job
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Buffer, Read

__all__ = ["Copies", "Copy"]

_GROUP_BYTES: Final = 4 << 20
_GROUP_READS: Final = 8
"""What a thread copies at most before it lets go of it."""


class Copy(NamedTuple):
    """A read, and the object that it is of (None: there is none)."""

    read: Read
    source: Buffer | None


class Copies:
    """The copies of one load, between their consumer on the loop and the threads that make them.

    The holds of all buffers and sources are taken at once, and released when the copy has been made
    or, after :meth:`leave`, never will be.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_is_waking",
        "_jobs",
        "_left",
        "_loop",
        "_start",
        "_threads",
        "_total",
        "_waiter",
    )

    def __init__(self, threads: IoThreads, copies: Iterable[Copy]) -> None:
        # The deque and the list are shared with the threads and changed in single steps only:
        # whoever takes a copy out of `left` is the one to let go of it.
        self._left = deque(copies)
        for read, source in self._left:
            read.buffer.hold.acquire()
            if source is not None:
                source.hold.acquire()
        self._threads = threads
        self._total = len(self._left)
        self._start = time.monotonic()
        self._ended: list[TransferResult] = []
        self._error: BaseException | None = None
        self._jobs: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._is_waking = False
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """As many threads as there is work for: to be woken for none costs as much as to copy.

        Raises:
            ClosedError: the threads are closed.
        """
        nbytes = sum(copy.read.buffer.nbytes for copy in self._left)
        groups = max(-(-nbytes // _GROUP_BYTES), -(-self._total // _GROUP_READS))
        for _ in range(min(self._threads.count, groups)):
            job = Job(self._work, self._report)
            self._threads.submit(job)
            self._jobs.append(job)

    def leave(self) -> None:
        """What has not begun never will."""
        if self._left:
            self._let_go_of_the_rest()
        for job in self._jobs:
            if not job.begun:
                self._threads.withdraw(job)
        self._jobs.clear()  # they refer to us: not left for the garbage collector

    async def after(self, given: int) -> list[TransferResult]:
        """Results beyond the first ``given``; none if that is all.

        Raises:
            ClosedError: the threads were closed.
        """
        while given == len(self._ended) < self._total:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._ended[given:]

    def _work(self) -> None:
        left, ended = self._left, self._ended
        while left:
            self._threads.check_open()
            taken: list[Copy] = []
            try:
                sizes = _copy(left, taken)
            finally:
                _let_go(taken)
            seconds = time.monotonic() - self._start
            ended.extend(
                [
                    TransferResult(copy.read, _status(copy, size), size, seconds)
                    for copy, size in zip(taken, sizes, strict=True)
                ]
            )
            if left or len(ended) == self._total:
                self._tell()

    def _report(self, _: object, error: BaseException | None) -> None:
        """A thread is through. Where the pool was closed, the rest is not copied either."""
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self._let_go_of_the_rest()
            self._error = error
            self._tell()

    def _let_go_of_the_rest(self) -> None:
        while self._left:
            with suppress(IndexError):  # another thread was quicker
                _let_go([self._left.popleft()])

    def _tell(self) -> None:
        """Wake the consumer; a burst of ends wakes it once."""
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False  # before the consumer looks: what comes later wakes again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _copy(left: deque[Copy], taken: list[Copy]) -> list[int]:
    """Move copies from ``left`` to ``taken`` and make them; how many bytes each had."""
    memmove, room = ctypes.memmove, _GROUP_BYTES
    sizes: list[int] = []
    while left and room > 0 and len(taken) < _GROUP_READS:
        try:
            copy = left.popleft()
        except IndexError:  # another thread was quicker
            break
        taken.append(copy)
        read, source = copy
        if source is None:
            sizes.append(0)
            continue
        buffer = read.buffer
        nbytes = buffer.nbytes
        there = source.nbytes - read.offset
        if there < nbytes:
            nbytes = max(0, there)
        memmove(buffer.address, source.address + read.offset, nbytes)
        sizes.append(nbytes)
        room -= nbytes
    return sizes


def _status(copy: Copy, size: int) -> TransferStatus:
    if copy.source is None:
        return TransferStatus.MISSING
    return TransferStatus.OK if size == copy.read.buffer.nbytes else TransferStatus.SHORT


def _let_go(copies: list[Copy]) -> None:
    for read, source in copies:
        read.buffer.hold.release()
        if source is not None:
            source.hold.release()

"""The reading side shared by thread-based backends: holds, order of arrival, abandonment.

The reads of one load are shared out among the threads as they get to them, so that a load costs a
hop a thread, not one a read. Knows nothing of where the bytes come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from cacheflow.errors import BackendError
from cacheflow.storage_backends.threads import Job
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Read

__all__ = ["load_on_threads"]


async def load_on_threads(
    threads: IoThreads,
    reads: Sequence[Read],
    read_into: Callable[[Read], tuple[TransferStatus, int]],
    released: Callable[[Read], None] = lambda read: None,
    *,
    patience: float = 0.0,
) -> AsyncGenerator[TransferResult, None]:
    """Run ``read_into`` for every read on ``threads``; yield results as they end.

    Every buffer's hold is taken here and released, and ``released`` called, once nobody can touch
    the buffer any more: from the thread when ``read_into`` has returned, or at once when the load
    is abandoned before the read began. ``OSError`` becomes a FAILED result.

    ``patience``: seconds for which a result may wait for the next ones of its thread before the
    event loop is woken; only for reads that cannot hang.
    """
    load = _Load(threads, reads, read_into, released, patience)
    jobs: list[Job] = []
    try:
        for _ in range(min(threads.count, len(reads))):
            job = Job(load.run, load.report)
            threads.submit(job)
            jobs.append(job)
        for _ in reads:
            yield await load.next()
    finally:
        load.let_go()
        for job in jobs:
            threads.withdraw(job)


class _Load:
    """One load, between its consumer on the loop and the threads that serve it.

    Both deques are only ever appended to and popped from, which are single steps on any thread;
    whoever pops a read is the one that lets go of it.
    """

    def __init__(
        self,
        threads: IoThreads,
        reads: Sequence[Read],
        read_into: Callable[[Read], tuple[TransferStatus, int]],
        released: Callable[[Read], None],
        patience: float,
    ) -> None:
        for read in reads:
            read.buffer.hold.acquire()
        self._threads = threads
        self._read_into = read_into
        self._released = released
        self._patience = patience
        self._start = self._told = time.monotonic()
        self._left = deque(reads)
        self._last = len(reads) - 1
        self._count = count()
        self._ended: deque[TransferResult | BaseException] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_waking = False
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> TransferResult:
        while not self._ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        ended = self._ended.popleft()
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def let_go(self) -> None:
        """What has not begun never will. From any thread."""
        while (read := self._take()) is not None:
            self._end(read)

    def run(self) -> None:
        """Serve reads until none is left: the work of each thread."""
        while self._left:
            self._threads.check_open()
            if (read := self._take()) is None:
                return
            result = self._read(read)
            self._ended.append(result)
            is_last = next(self._count) == self._last
            if is_last or time.monotonic() - self._told >= self._patience:
                self._tell()

    def report(self, _: object, error: BaseException | None) -> None:
        """A thread is through. Where the pool was closed, the rest is not read either."""
        if error is not None:
            self.let_go()
            self._ended.append(error)
            self._tell()

    def _take(self) -> Read | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def _read(self, read: Read) -> TransferResult:
        error = None
        try:
            status, nbytes = self._read_into(read)
        except OSError as caught:
            status, nbytes = TransferStatus.FAILED, 0
            reason = caught.strerror or str(caught)
            error = BackendError(reason, operation="load", context=repr(read.key))
        finally:
            self._end(read)
        return TransferResult(read, status, nbytes, time.monotonic() - self._start, error)

    def _end(self, read: Read) -> None:
        read.buffer.hold.release()
        self._released(read)

    def _tell(self) -> None:
        """Wake the consumer; a burst of results wakes it once."""
        self._told = time.monotonic()
        if not self._is_waking:
            self._is_waking = True
            # The loop may be gone when hung I/O ends at last.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False  # before the consumer looks: what comes later wakes again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

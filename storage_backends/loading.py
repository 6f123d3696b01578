"""The reading side shared by thread-based backends: holds, order of arrival, abandonment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

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
) -> AsyncGenerator[TransferResult, None]:
    """Run ``read_into`` for every read on ``threads``; yield results as they end.

    Every buffer's hold is taken here and released, and ``released`` called, once nobody can touch
    the buffer any more: from the thread when ``read_into`` has returned, or at once when the read
    is withdrawn before it began. ``OSError`` becomes a FAILED result.
    """
    for read in reads:
        read.buffer.hold.acquire()

    def let_go(read: Read) -> None:
        read.buffer.hold.release()
        released(read)

    arrivals = _Arrivals()
    jobs: list[Job] = []
    try:
        for read in reads:
            work = partial(_read, read, read_into, let_go, time.monotonic())
            job = Job(work, arrivals.report, partial(let_go, read))
            threads.submit(job)
            jobs.append(job)
        for _ in reads:
            yield await arrivals.next()
    finally:
        for job in jobs:
            threads.withdraw(job)
        for read in reads[len(jobs) :]:
            let_go(read)


def _read(
    read: Read,
    read_into: Callable[[Read], tuple[TransferStatus, int]],
    let_go: Callable[[Read], None],
    start: float,
) -> TransferResult:
    error = None
    try:
        status, nbytes = read_into(read)
    except OSError as caught:
        status, nbytes = TransferStatus.FAILED, 0
        reason = caught.strerror or str(caught)
        error = BackendError(reason, operation="load", context=repr(read.key))
    finally:
        let_go(read)
    return TransferResult(read, status, nbytes, time.monotonic() - start, error)


class _Arrivals:
    """Ends of jobs, from any thread to one consumer; a burst of them wakes the loop once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: deque[tuple[Any, BaseException | None]] = deque()
        self._is_waking = False
        self._waiter: asyncio.Future[None] | None = None

    def report(self, result: Any, error: BaseException | None) -> None:
        self._ended.append((result, error))
        if not self._is_waking:
            self._is_waking = True
            # The loop may be gone when hung I/O ends at last.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False  # before the consumer looks: what comes later wakes again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> TransferResult:
        while not self._ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        result, error = self._ended.popleft()
        if error is not None:
            raise error
        assert isinstance(result, TransferResult)
        return result

"""The reading side shared by thread-based backends: holds, order of arrival, abandonment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import BackendError
from cacheflow.storage_backends.threads import Job
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Read

__all__ = ["load_on_threads"]

_PATIENCE: Final = 0.001
_GROUP_READS: Final = 8
"""At most so many reads are begun, and so cannot be withdrawn any more, by one thread at a time."""


async def load_on_threads(
    threads: IoThreads,
    reads: Sequence[Read],
    read_into: Callable[[Read], tuple[TransferStatus, int]],
    released: Callable[[Read], None] = lambda read: None,
    *,
    group_bytes: int = 0,
) -> AsyncGenerator[TransferResult, None]:
    """Run ``read_into`` for every read on ``threads``; yield results as they end.

    Every buffer's hold is taken here and released, and ``released`` called, once nobody can touch
    the buffer any more: from the thread when ``read_into`` has returned, or at once when the read
    is withdrawn before it began. ``OSError`` becomes a FAILED result.

    ``group_bytes``: reads of no more than so many bytes in all may go to a thread, and come back,
    together, as long as every thread gets a share; for reads that are short and cannot hang.
    """
    for read in reads:
        read.buffer.hold.acquire()

    def let_go(group: Sequence[Read]) -> None:
        for read in group:
            read.buffer.hold.release()
            released(read)

    arrivals = _Arrivals(patience=_PATIENCE if group_bytes else 0.0)
    groups = _groups(reads, threads.count, group_bytes)
    jobs: list[Job] = []
    try:
        for group in groups:
            work = partial(_read, group, read_into, let_go, arrivals)
            job = Job(work, arrivals.report, partial(let_go, group))
            threads.submit(job)
            jobs.append(job)
        for _ in groups:
            for result in await arrivals.next():
                yield result
    finally:
        for job in jobs:
            threads.withdraw(job)
        for group in groups[len(jobs) :]:
            let_go(group)


def _groups(reads: Sequence[Read], threads: int, group_bytes: int) -> list[list[Read]]:
    """``reads`` in order, cut where a group has its share of the bytes."""
    share = min(group_bytes, -(-sum(read.buffer.nbytes for read in reads) // threads))
    groups: list[list[Read]] = []
    room = 0
    for read in reads:
        if not groups or room < read.buffer.nbytes or len(groups[-1]) == _GROUP_READS:
            groups.append([])
            room = share
        groups[-1].append(read)
        room -= read.buffer.nbytes
    return groups


def _read(
    group: Sequence[Read],
    read_into: Callable[[Read], tuple[TransferStatus, int]],
    let_go: Callable[[Sequence[Read]], None],
    arrivals: _Arrivals,
) -> list[TransferResult]:
    arrivals.running.add(id(group))
    ended: list[tuple[TransferStatus, int]] = []
    errors: dict[int, BackendError] = {}
    try:
        for at, read in enumerate(group):
            try:
                ended.append(read_into(read))
            except OSError as error:
                ended.append((TransferStatus.FAILED, 0))
                errors[at] = _failure(read, error)
    finally:
        arrivals.running.discard(id(group))
        let_go(group)
    seconds = time.monotonic() - arrivals.start
    return [
        TransferResult(read, status, nbytes, seconds, errors.get(at))
        for at, (read, (status, nbytes)) in enumerate(zip(group, ended, strict=True))
    ]


def _failure(read: Read, error: OSError) -> BackendError:
    reason = error.strerror or str(error)
    return BackendError(reason, operation="load", context=repr(read.key))


class _Arrivals:
    """Ends of jobs, from any thread to one consumer; a burst of them wakes the loop once.

    ``patience``: seconds for which an end may wait for that of another group that is being read.
    """

    def __init__(self, patience: float) -> None:
        self.start = self._told = time.monotonic()
        self.running: set[int] = set()
        """Groups being read. Added to and discarded from on any thread: single steps."""
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._ended: deque[tuple[Any, BaseException | None]] = deque()
        self._is_waking = False
        self._waiter: asyncio.Future[None] | None = None

    def report(self, results: Any, error: BaseException | None) -> None:
        self._ended.append((results, error))
        if self.running and error is None and time.monotonic() - self._told < self._patience:
            return
        if not self._is_waking:
            self._is_waking = True
            self._told = time.monotonic()
            # The loop may be gone when hung I/O ends at last.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_waking = False  # before the consumer looks: what comes later wakes again
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[TransferResult]:
        while not self._ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        results, error = self._ended.popleft()
        if error is not None:
            raise error
        assert isinstance(results, list)
        return results

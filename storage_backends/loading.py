"""The reading side shared by thread-based backends: holds, order of arrival, abandonment."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from cacheflow.errors import BackendError
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from cacheflow.storage_backends.threads import IoThreads, Job
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
    left = deque(reads)
    for read in left:
        read.buffer.hold.acquire()

    def let_go(read: Read) -> None:
        read.buffer.hold.release()
        released(read)

    jobs: dict[asyncio.Future[TransferResult], Job] = {}
    try:
        while left:
            read = left[0]
            work = _work(read, read_into, let_go)
            job = threads.submit(work, abandoned=partial(let_go, read))
            jobs[job.done] = job
            left.popleft()
        while jobs:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                del jobs[future]
                yield future.result()
    finally:
        for job in jobs.values():
            job.withdraw()
        for read in left:
            let_go(read)


def _work(
    read: Read,
    read_into: Callable[[Read], tuple[TransferStatus, int]],
    let_go: Callable[[Read], None],
) -> Callable[[], TransferResult]:
    start = time.monotonic()

    def work() -> TransferResult:
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

    return work

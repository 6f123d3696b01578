"""The writing side shared by thread-based backends: holds, order of results, abandonment."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.errors import CacheFlowError
    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Write

__all__ = ["store_on_threads"]


async def store_on_threads(
    threads: IoThreads,
    writes: Sequence[Write],
    put: Callable[[Write], tuple[TransferStatus, CacheFlowError | None]],
) -> list[TransferResult]:
    """Run ``put`` for every write on ``threads``; results in the order given.

    The holds of all parts are taken here and released once nobody can read them any more: from the
    thread when ``put`` has returned, or at once when the write is withdrawn before it began.

    Raises:
        ClosedError: the threads were closed.
    """
    for write in writes:
        for part in write.parts:
            part.hold.acquire()
    start = time.monotonic()
    jobs = [
        threads.start(partial(_put, write, put, start), partial(_let_go, write)) for write in writes
    ]
    try:
        return list(await asyncio.gather(*(asyncio.shield(job.done) for job in jobs)))
    except BaseException:
        for job in jobs:
            threads.withdraw(job)
        raise


def _put(
    write: Write,
    put: Callable[[Write], tuple[TransferStatus, CacheFlowError | None]],
    start: float,
) -> TransferResult:
    try:
        status, error = put(write)
    finally:
        _let_go(write)
    nbytes = write.nbytes if status is TransferStatus.OK else 0
    return TransferResult(write, status, nbytes, time.monotonic() - start, error)


def _let_go(write: Write) -> None:
    for part in write.parts:
        part.hold.release()

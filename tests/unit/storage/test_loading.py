"""Loads on threads: which reads travel together, and that everything is let go of."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.storage_backends.loading import load_on_threads
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from cacheflow.storage_backends.threads import Job

KEY = make_object(0).key


def reads_of(*sizes: int) -> list[Read]:
    return [Read(KEY, at, aligned_buffer(size)) for at, size in enumerate(sizes)]


class CountedThreads(IoThreads):
    """Counts the jobs that it is given."""

    jobs = 0

    def submit(self, job: Job) -> None:
        self.jobs += 1
        super().submit(job)


def whole(read: Read) -> tuple[TransferStatus, int]:
    return TransferStatus.OK, read.buffer.nbytes


@pytest.mark.parametrize(
    ("sizes", "group_bytes", "jobs"),
    [
        ([100] * 4, 0, 4),  # not together at all
        ([100] * 4, 1000, 2),  # every thread has its share
        ([100] * 16, 400, 4),  # as many as fit
        ([500, 100, 500], 400, 3),  # what is larger goes alone
        ([1] * 40, 1000, 5),  # not all of many small ones: the rest can still be withdrawn
        ([0, 0, 100], 0, 2),
        ([100], 1000, 1),
        ([], 1000, 0),
    ],
)
async def test_reads_travel_together(sizes: list[int], group_bytes: int, jobs: int) -> None:
    """Reads share a way to a thread up to the given bytes, with a share for each thread; every one
    has its own result."""
    threads, reads = CountedThreads(2, "test"), reads_of(*sizes)
    load = load_on_threads(threads, reads, whole, group_bytes=group_bytes)
    results = [result async for result in load]
    assert sorted(r.request.offset for r in results if isinstance(r.request, Read)) == list(
        range(len(sizes))
    )
    assert {result.status for result in results} <= {TransferStatus.OK}
    assert sum(result.nbytes for result in results) == sum(sizes)
    assert threads.jobs == jobs
    assert all(read.buffer.hold.in_flight == 0 for read in reads)
    assert await threads.aclose(1.0)


async def test_a_read_that_fails_does_not_take_the_others_with_it() -> None:
    """An OSError is the result of its own read only."""
    threads, reads = IoThreads(1, "test"), reads_of(1, 1, 1)

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        if read.offset == 1:
            raise OSError(5, "Input/output error")
        return whole(read)

    load = load_on_threads(threads, reads, read_into, group_bytes=100)
    results = [result async for result in load]
    assert [r.status for r in results] == [
        TransferStatus.OK,
        TransferStatus.FAILED,
        TransferStatus.OK,
    ]
    assert "Input/output error" in str(results[1].error)
    assert await threads.aclose(1.0)


async def test_a_bug_lets_go_of_the_whole_group() -> None:
    """Any other error is raised, and no buffer stays held."""
    threads, reads = IoThreads(1, "test"), reads_of(1, 1, 1)
    released: list[Read] = []

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        raise ZeroDivisionError

    load = load_on_threads(threads, reads, read_into, released.append, group_bytes=100)
    with pytest.raises(ZeroDivisionError):
        await anext(load)
    assert released == reads
    assert all(read.buffer.hold.in_flight == 0 for read in reads)
    assert await threads.aclose(1.0)


async def test_an_abandoned_load_keeps_only_what_has_begun() -> None:
    """Leaving while a thread is in the first group: its reads stay held until it is through, those
    of the groups behind it are let go of at once and never read."""
    threads, reads = IoThreads(1, "test"), reads_of(*[1] * 20)
    began, go, read_at = threading.Event(), threading.Event(), []

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        read_at.append(read.offset)
        began.set()
        go.wait(30)
        return whole(read)

    load: Any = load_on_threads(threads, reads, read_into, group_bytes=100)
    first = asyncio.ensure_future(anext(load))
    await until_set(began)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await load.aclose()
    held = [read.offset for read in reads if read.buffer.hold.in_flight]
    assert held == list(range(8))
    go.set()
    assert await threads.aclose(10.0)
    assert read_at == held
    assert not any(read.buffer.hold.in_flight for read in reads)


async def until_set(began: threading.Event) -> None:
    assert await asyncio.to_thread(began.wait, 10)

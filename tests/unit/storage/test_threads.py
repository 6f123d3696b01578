"""The I/O threads: bounded, withdrawable, closed without waiting for what is hung."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from cacheflow.errors import ClosedError
from cacheflow.storage_backends.threads import IoThreads


async def test_no_more_than_the_count_run_at_once() -> None:
    """Jobs beyond the number of threads wait their turn."""
    lock, running, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        for _ in range(2000):
            pass
        with lock:
            running -= 1

    threads = IoThreads(3, "test")
    await asyncio.gather(*(threads.run(work) for _ in range(60)))
    assert most <= 3
    assert await threads.aclose(1.0)


async def test_errors_reach_who_awaits() -> None:
    """An exception in a job is raised where it is awaited; the thread goes on."""
    threads = IoThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: "still here") == "still here"
    assert await threads.aclose(1.0)


async def test_closing_leaves_hung_jobs_behind() -> None:
    """Closing withdraws what has not begun, waits a little for what has, and then tells everyone
    ClosedError; the hung job's end is ignored."""
    began, go, ran = threading.Event(), threading.Event(), []
    threads = IoThreads(1, "test")
    withdrawn: list[int] = []

    def hang() -> None:
        began.set()
        go.wait(30)

    hung = threads.start(hang)
    queued = threads.start(lambda: ran.append(1), lambda: withdrawn.append(1))
    await asyncio.to_thread(began.wait, 10)
    assert not await threads.aclose(0.01)
    for job in (hung, queued):
        with pytest.raises(ClosedError):
            await job.done
    with pytest.raises(ClosedError):
        threads.start(hang)
    go.set()
    await asyncio.to_thread(threads._threads[0].join, 10)
    assert (ran, withdrawn) == ([], [1])


async def test_a_job_is_run_or_withdrawn_never_both() -> None:
    """Racing threads against withdrawal, exactly one of `work` and `abandoned` happens."""
    threads = IoThreads(2, "test")
    for _ in range(300):
        happened: list[str] = []
        job = threads.start(
            partial(happened.append, "work"),
            partial(happened.append, "abandoned"),
        )
        await asyncio.sleep(0)
        threads.withdraw(job)
        await asyncio.wait([job.done])
        assert len(happened) == 1
    assert await threads.aclose(1.0)

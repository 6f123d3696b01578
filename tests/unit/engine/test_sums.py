"""Sums over NCCL whose other ranks are gone: seen by a thread, never by torch's watchdog."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import pytest

from cacheflow.plugins.tensor_parallel.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sum:
    """One that is done when it is told so, and then ``fails`` or not."""

    def __init__(self, fails: str = "", *, done: bool = True) -> None:
        self.done, self.fails = done, fails
        self.waited = threading.Event()

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> bool:
        self.waited.set()
        if self.fails:
            raise RuntimeError(self.fails)
        return True


Told = queue.SimpleQueue[Exception]


@pytest.fixture
def told() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def watch(told: Told) -> Iterator[Watch]:
    watch = Watch(0.5, told.put)
    yield watch
    watch.stop()


def test_a_sum_that_never_ends_is_overdue(watch: Watch, told: Told) -> None:
    """The rank that it waits for died or stands still."""
    watch.follow(Sum(done=False))  # type: ignore[arg-type]
    error = told.get(timeout=20.0)
    assert isinstance(error, TimeoutError)
    assert str(error) == "a sum was not done in 0.5 s"


def test_what_nccl_has_found_is_told(watch: Watch, told: Told) -> None:
    """A broken connection, for one."""
    watch.follow(Sum("NCCL error: remote process exited"))  # type: ignore[arg-type]
    assert str(told.get(timeout=20.0)) == "NCCL error: remote process exited"


def test_sums_that_end_are_followed_by_others(watch: Watch, told: Told) -> None:
    """The newest is looked at; nothing is told of those that are done, however old."""
    for _ in range(2):
        done = Sum()
        watch.follow(done)  # type: ignore[arg-type]
        assert done.waited.wait(20.0)
    assert told.empty()
    watch.follow(Sum(done=False))  # type: ignore[arg-type]
    assert isinstance(told.get(timeout=20.0), TimeoutError)


def test_a_watch_that_is_stopped_tells_nothing(told: Told) -> None:
    """Its thread is gone."""
    before = set(threading.enumerate())
    watch = Watch(0.5, told.put)
    (thread,) = set(threading.enumerate()) - before
    watch.stop()
    thread.join(20.0)
    assert not thread.is_alive()
    assert told.empty()

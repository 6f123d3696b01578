"""A small pool of daemon threads for blocking I/O, used from one event loop.

Unlike ``concurrent.futures``, whose threads are joined at interpreter exit, a thread hung in the
kernel holds up neither closing nor exit. Jobs that were not begun can be withdrawn. How a job's end
is told is the submitter's affair: a future for single jobs, something cheaper for batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cacheflow.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FutureJob", "IoThreads", "Job", "Report"]

Report: TypeAlias = "Callable[[Any, BaseException | None], None]"
"""Takes a job's result, or its error, from any thread; whatever comes after the first is late."""


@dataclass(slots=True, eq=False)
class Job:
    """One piece of work. Exactly one of ``work`` and ``abandoned`` is called."""

    work: Callable[[], Any]
    report: Report
    abandoned: Callable[[], None] | None = None
    """Called instead of ``work`` when the job is withdrawn before it began."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: bool = False

    def begin(self) -> bool:
        """Take the job; False if someone else has."""
        with self.lock:
            begun, self.begun = self.begun, True
            return not begun


@dataclass(slots=True, eq=False)
class FutureJob(Job):
    """A job whose end is a future of the loop that submitted it."""

    done: asyncio.Future[Any] = field(kw_only=True)


class IoThreads:
    """``count`` daemon threads, started on first use. Methods are called on the event loop."""

    def __init__(self, count: int, name: str) -> None:
        self.count: Final = count
        self._name: Final = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: set[Job] = set()
        """Not ended yet. Added to on the loop, discarded from on any thread: single steps."""
        self._all_ended: asyncio.Future[None] | None = None
        self._closed = False

    def check_open(self) -> None:
        """Raises ClosedError once the pool is being closed. From any thread."""
        if self._closed:
            raise ClosedError(f"{self._name} was closed")

    def submit(self, job: Job) -> None:
        """Queue ``job``.

        Raises:
            ClosedError: the pool was closed; neither ``work`` nor ``abandoned`` is called.
        """
        self.check_open()
        while len(self._threads) < self.count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._open.add(job)
        self._jobs.put(job)

    def start(
        self, work: Callable[[], Any], abandoned: Callable[[], None] | None = None
    ) -> FutureJob:
        """Queue ``work``; its end is the future ``done``. See :meth:`submit`."""
        done = asyncio.get_running_loop().create_future()
        # Whoever awaits sees the error; one that nobody awaits any more is of no interest.
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        job = FutureJob(work, _reporter(done), abandoned, done=done)
        self.submit(job)
        return job

    async def run(
        self, work: Callable[[], Any], abandoned: Callable[[], None] | None = None
    ) -> Any:
        """Start ``work`` and await it; cancelling withdraws it if it has not begun."""
        job = self.start(work, abandoned)
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            self.withdraw(job)
            raise

    def withdraw(self, job: Job, error: Exception | None = None) -> bool:
        """Take ``job`` so that it never runs; False if it already has begun (or ended).

        Its end is then ``error``, or a cancellation where there is none.
        """
        if not job.begin():
            return False
        self._open.discard(job)
        if job.abandoned is not None:
            job.abandoned()
        job.report(None, error or asyncio.CancelledError())
        return True

    async def aclose(self, seconds: float) -> bool:
        """Withdraw what has not begun and wait at most ``seconds`` for the rest; True if it ended.

        Whoever still waits for a job gets a ClosedError; a hung one keeps what it holds until it
        ends.
        """
        self._closed = True
        error = ClosedError(f"{self._name} was closed")
        for job in list(self._open):
            self.withdraw(job, error)
        for _ in self._threads:
            self._jobs.put(None)
        self._all_ended = asyncio.get_running_loop().create_future()
        if self._open:
            await asyncio.wait([self._all_ended], timeout=seconds)
        hung = list(self._open)
        for job in hung:
            job.report(None, error)
        return not hung

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.begin():
                continue
            try:
                result, error = job.work(), None
            except BaseException as caught:  # carried to whoever waits for the job
                result, error = None, caught
            self._open.discard(job)
            job.report(result, error)
            if self._all_ended is not None and not self._open:
                _reporter(self._all_ended)(None, None)
            del job, result, error  # nothing is kept alive while waiting for the next


def _reporter(done: asyncio.Future[Any]) -> Report:
    def on_loop(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        elif isinstance(error, asyncio.CancelledError):
            done.cancel()
        else:
            done.set_exception(error)

    def report(result: Any, error: BaseException | None) -> None:
        # The loop may be gone when hung I/O ends at last.
        with contextlib.suppress(RuntimeError):
            done.get_loop().call_soon_threadsafe(on_loop, result, error)

    return report

"""A small pool of daemon threads for blocking I/O, awaited from one event loop.

Unlike ``concurrent.futures``, whose threads are joined at interpreter exit, a thread hung in the
kernel holds up neither closing nor exit. Jobs that were not begun can be withdrawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheflow.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IoThreads", "Job"]


@dataclass(slots=True, eq=False)
class Job:
    """One piece of work; ``done`` resolves on the loop. ``begun`` may be read from any thread."""

    work: Callable[[], Any]
    done: asyncio.Future[Any]
    abandoned: Callable[[], None] | None
    """Called instead of ``work`` when the job is withdrawn before it began."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: bool = False

    def begin(self) -> bool:
        """Take the job; False if someone else has."""
        with self.lock:
            begun, self.begun = self.begun, True
            return not begun

    def withdraw(self, error: Exception | None = None) -> bool:
        """Take the job so that it never runs; False if it already has begun.

        Whoever awaits it gets ``error``, or a cancellation where there is none.
        """
        if not self.begin():
            return False
        if self.abandoned is not None:
            self.abandoned()
        self.fail(error)
        return True

    def fail(self, error: Exception | None) -> None:
        """End ``done``, if it has not ended, whatever becomes of the work."""
        if self.done.done():
            return
        if error is None:
            self.done.cancel()
        else:
            self.done.set_exception(error)


class IoThreads:
    """``count`` daemon threads, started on first use."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: set[Job] = set()
        self._closed = False

    def submit(
        self, work: Callable[[], Any], *, abandoned: Callable[[], None] | None = None
    ) -> Job:
        """Queue ``work``. Withdrawing (or closing) before it begins calls ``abandoned`` instead.

        Raises:
            ClosedError: the pool was closed.
        """
        if self._closed:
            raise ClosedError(f"{self._name} was closed")
        job = Job(work, asyncio.get_running_loop().create_future(), abandoned)
        self._open.add(job)
        job.done.add_done_callback(lambda done: self._forget(job, done))
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)
        return job

    async def run(self, work: Callable[[], Any]) -> Any:
        """Submit and await; cancelling withdraws the job if it has not begun."""
        job = self.submit(work)
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            job.withdraw()
            raise

    async def aclose(self, seconds: float) -> bool:
        """Withdraw what has not begun and wait at most ``seconds`` for the rest; True if it ended.

        Whoever still awaits a job gets a ClosedError; a hung one keeps what it holds until it ends.
        """
        self._closed = True
        error = ClosedError(f"{self._name} was closed")
        for job in list(self._open):
            job.withdraw(error)
        for _ in self._threads:
            self._jobs.put(None)
        running = [job for job in self._open if not job.done.done()]
        if running:
            await asyncio.wait([job.done for job in running], timeout=seconds)
        hung = [job for job in running if not job.done.done()]
        for job in hung:
            job.fail(error)
        return not hung

    def _forget(self, job: Job, done: asyncio.Future[Any]) -> None:
        self._open.discard(job)
        if not done.cancelled():
            done.exception()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.begin():
                try:
                    result, error = job.work(), None
                except BaseException as caught:  # carried to whoever awaits the job
                    result, error = None, caught
                self._deliver(job, result, error)

    @staticmethod
    def _deliver(job: Job, result: Any, error: BaseException | None) -> None:
        def on_loop() -> None:
            if job.done.done():
                return
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)

        # The loop may be gone when hung I/O ends at last.
        with contextlib.suppress(RuntimeError):
            job.done.get_loop().call_soon_threadsafe(on_loop)

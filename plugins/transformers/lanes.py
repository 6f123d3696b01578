"""Where compute and copies run: one compute thread and one copy thread, with or without CUDA.

On a CPU a lane is a daemon thread that does the work itself. On a GPU the same threads enqueue on
a compute stream and on a copy stream; events order the two and the threads, never the event loop,
wait for them. Knows no model and no KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["CpuStreams", "CudaStreams", "Lane", "Mark", "Streams"]

T = TypeVar("T")


class Mark(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed the point."""
        ...


class Streams(Protocol):
    """The device's side of two lanes. ``ahead``: layers claimed ahead of the device."""

    ahead: int

    def compute(self) -> AbstractContextManager[object]:
        """Work inside is enqueued on the compute stream."""
        ...

    def copy(self) -> AbstractContextManager[object]:
        """Work inside is enqueued on the copy stream."""
        ...

    def mark(self) -> Mark:
        """A mark at the end of the current stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is enqueued on the current stream from now on runs after ``mark``."""
        ...


class _Passed:
    def synchronize(self) -> None:
        return


class CpuStreams:
    """No streams: work is done when the call returns."""

    ahead = 0

    def compute(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def copy(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        return _Passed()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()


class CudaStreams:
    """One compute and one copy stream of one device."""

    ahead = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)

    def compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def copy(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class Lane:
    """A daemon thread that runs callables one after another, awaited from the event loop.

    Cancelling the await does not stop the callable: whoever owns its memory must wait for it.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name=name, daemon=True
        )
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread and return what it returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

        def job() -> None:
            try:
                result = work()
            except BaseException as error:  # carried to the awaiting task, whatever it is
                _post(loop, future.set_exception, future, error)
            else:
                _post(loop, future.set_result, future, result)

        self._jobs.put(job)
        return await asyncio.shield(future)

    async def stop(self, seconds: float) -> None:
        """End the thread after what is queued, waiting for it at most ``seconds``."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, seconds)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                job()


def _post(
    loop: asyncio.AbstractEventLoop,
    setter: Callable[[T], None],
    future: asyncio.Future[T] | asyncio.Future[object],
    value: T,
) -> None:
    def deliver() -> None:
        if not future.done():
            setter(value)

    # The loop may be gone when a cancelled caller's work ends after it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver)

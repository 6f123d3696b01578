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
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["CpuStreams", "CudaStreams", "Gathered", "Lane", "Mark", "Streams", "prepared"]

T = TypeVar("T")
W = TypeVar("W")


class Mark(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed the point."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Time between two marks of one stream, both passed."""
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

    def side(self) -> Callable[[], AbstractContextManager[object]]:
        """A further stream of one's own: work inside what it returns is enqueued there."""
        ...

    def mark(self) -> Mark:
        """A mark at the end of the current stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is enqueued on the current stream from now on runs after ``mark``."""
        ...

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """``numbers`` as int64 on the device, without waiting for the device."""
        ...

    def hand_to_compute(self, made: torch.Tensor) -> None:
        """``made`` on another stream is used on the compute stream: its memory is not given to
        anything else before that has passed whatever uses it."""
        ...


class _Passed:
    """A mark on a thread that does its work itself: passed when it is made."""

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: _Passed) -> float:
        return self._time - earlier._time


class CpuStreams:
    """No streams: work is done when the call returns."""

    ahead = 0

    def compute(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def copy(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def side(self) -> Callable[[], AbstractContextManager[object]]:
        return contextlib.nullcontext

    def mark(self) -> Mark:
        return _Passed()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def hand_to_compute(self, made: torch.Tensor) -> None:
        return


class _CudaMark:
    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: the waiting thread sleeps instead of spinning beside the event loop.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: _CudaMark) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStreams:
    """One compute and one copy stream of one device."""

    ahead = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        # The weights were copied on the default stream, which neither of the two waits for.
        torch.cuda.synchronize(device)

    def compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def copy(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy)

    def side(self) -> Callable[[], AbstractContextManager[object]]:
        stream = torch.cuda.Stream(self._device)
        return lambda: torch.cuda.stream(stream)

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self._device).wait_event(mark.event)

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        return host.to(self._device, non_blocking=True)

    def hand_to_compute(self, made: torch.Tensor) -> None:
        made.record_stream(self._compute)


class Lane:
    """A daemon thread that runs callables one after another, awaited from the event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue ``work``; the future gets what it returns or raises.

        Cancelling the future does not stop the callable: whoever owns its memory waits for it.
        """
        future, job = prepared(work)
        self._jobs.put(job)
        return future

    def put(self, job: Callable[[], None]) -> None:
        """Queue ``job``, which must not raise and tells nobody when it has ended."""
        self._jobs.put(job)

    async def stop(self, seconds: float) -> None:
        """End the thread after what is queued, waiting for it at most ``seconds``."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, seconds)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                job()


class Gathered(Generic[W]):
    """Small works of one kind for one lane, done together by ``do`` as far as they wait together.

    Between two works the lane's thread finds cold caches and waits for the interpreter's lock, as
    long as copying some hundred KiB takes. ``most``: bytes of what is done together, one work at
    least. Submitted to on the loop.
    """

    def __init__(self, lane: Lane, do: Callable[[Sequence[W]], None], most: int) -> None:
        self._lane = lane
        self._do = do
        self._most = most
        self._waiting: deque[tuple[W, int, asyncio.Future[None]]] = deque()
        """Added to on the loop, taken from by the lane's thread: single steps."""

    def submit(self, work: W, nbytes: int) -> asyncio.Future[None]:
        """Queue ``work``; the future ends with it. See :meth:`Lane.submit`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, nbytes, future))
        self._lane.put(self._run)
        return future

    def _run(self) -> None:
        works, futures, room = [], [], self._most
        while self._waiting and room > 0:
            work, nbytes, future = self._waiting.popleft()
            works.append(work)
            futures.append(future)
            room -= nbytes
        if not works:  # an earlier one has done it
            return
        errors: list[BaseException | None] = [None] * len(works)
        try:
            self._do(works)
        except BaseException:  # one of them: each learns what became of its own
            errors = [self._error_of(work) for work in works]
        # The loop may be gone when a cancelled caller's work ends after it.
        with contextlib.suppress(RuntimeError):
            futures[0].get_loop().call_soon_threadsafe(_deliver, futures, errors)

    def _error_of(self, work: W) -> BaseException | None:
        try:
            self._do([work])
        except BaseException as error:  # carried to the awaiting task, whatever it is
            return error
        return None


def _deliver(
    futures: Sequence[asyncio.Future[None]], errors: Sequence[BaseException | None]
) -> None:
    for future, error in zip(futures, errors, strict=True):
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # nobody's, if its caller was cancelled


def prepared(work: Callable[[], T]) -> tuple[asyncio.Future[T], Callable[[], None]]:
    """A future of the running loop, and what another thread calls to do ``work`` for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # A caller that was cancelled asks no more; what its work raised is nobody's then.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def job() -> None:
        try:
            result = work()
        except BaseException as error:  # carried to the awaiting task, whatever it is
            _post(loop, future, future.set_exception, error)
        else:
            _post(loop, future, future.set_result, result)

    return future, job


def _post(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    setter: Callable[[Any], None],
    value: object,
) -> None:
    def deliver() -> None:
        if not future.done():
            setter(value)

    # The loop may be gone when a cancelled caller's work ends after it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver)

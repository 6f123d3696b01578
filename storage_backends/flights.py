"""Requests on their way: bounded in number, owned by the backend, ended when it closes.

Whoever waits for a request that closing has ended gets a ClosedError. Cancelling whoever waits
cancels the request. Belongs to one event loop; does not know what a request is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeAlias, TypeVar

from cacheflow.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["Batch", "Flights"]

T = TypeVar("T")
Work: TypeAlias = "Callable[[], Awaitable[T]]"

_CLOSE_SECONDS: Final = 1.0


class Flights:
    """At most ``limit`` requests at once; the others wait in order of arrival."""

    def __init__(self, limit: int, what: str) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._what = what
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def check_open(self) -> None:
        """Raises ClosedError once closing has begun."""
        if self._closed:
            raise ClosedError(f"{self._what} is closed")

    async def all(self, works: Sequence[Work[T]]) -> list[T]:
        """The results in order; the first error ends the others and is raised."""
        tasks = [self._start(work) for work in works]
        if not tasks:
            return []
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                self.result(task)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def begin(self, works: Sequence[tuple[Work[T], Callable[[], None]]]) -> Batch[T]:
        """Begin them all. The second part of a work is called when it has ended, one way or the
        other: done, failed, cancelled, never begun."""
        batch: Batch[T] = Batch(self)
        for work, ended in works:
            batch.add(self._start(work), ended)
        return batch

    async def aclose(self) -> None:
        """Cancel everything; bounded by a second. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    def result(self, task: asyncio.Task[T]) -> T:
        """Of a request that has ended; raises what it raised."""
        if task.cancelled():  # by closing: nobody else cancels what is still waited for
            self.check_open()
        return task.result()

    def _start(self, work: Work[T]) -> asyncio.Task[T]:
        self.check_open()
        task = asyncio.create_task(self._within(work))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _within(self, work: Work[T]) -> T:
        async with self._slots:
            return await work()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen by whoever waits; of no interest to one who left


class Batch(Generic[T]):
    """Requests begun together; :meth:`next` gives their results as they come. Leaving the context
    ends what has not ended.

    Neither a queue nor an async generator: there is one of these for each load, and either costs
    more than the rest of it.
    """

    __slots__ = ("_arrived", "_flights", "_tasks", "_waiter")

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self._tasks: list[asyncio.Task[T]] = []
        self._arrived: deque[asyncio.Task[T]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def add(self, task: asyncio.Task[T], ended: Callable[[], None]) -> None:
        """One more; ``ended`` is called when it has."""

        def has_ended(task: asyncio.Task[T]) -> None:
            ended()
            self._arrived.append(task)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

        task.add_done_callback(has_ended)
        self._tasks.append(task)

    async def next(self) -> T:
        """The next result, of as many as there are requests; raises what the request raised."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._flights.result(self._arrived.popleft())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()

"""Awaiting what must not be interrupted half way, and what others change.

Cancelling who waits for a thread does not stop the thread: what it is opening, or writing into,
is nobody's then. Knows nothing of what is awaited.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["Lasting", "Pulse", "all_or_nothing", "no_strays", "to_the_end"]

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even if cancelled meanwhile; cancellation is raised afterwards.

    For short, bounded steps of which a half is worse than a delay: clean-up, a copy that a thread
    is making out of memory about to be reused.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # the task's own error: re-raised by result() below
            break
    if cancelled is not None:
        raise cancelled
    return task.result()


async def all_or_nothing(making: Awaitable[T], undo: Callable[[T], Awaitable[object]]) -> T:
    """What ``making`` gives: a file, a socket, whatever has to be closed. Cancelled meanwhile, it
    is made to its end and undone before the cancellation is raised: nobody else knows of it.
    """
    task = asyncio.ensure_future(making)
    try:
        return await to_the_end(task)
    except asyncio.CancelledError:
        if not task.cancelled() and task.exception() is None:
            await to_the_end(undo(task.result()))
        raise


class Lasting(AbstractAsyncContextManager[None]):
    """From ``begin`` to ``end``; where ``begin`` raises there is no end.

    Not a generator: a loop that ends closes all generators at once, also those that others, which
    it is closing too, are still inside of.
    """

    def __init__(
        self, begin: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[object]]
    ) -> None:
        self._begin = begin
        self._end = end

    async def __aenter__(self) -> None:
        await self._begin()

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end()


@contextmanager
def no_strays() -> Iterator[None]:
    """A CancelledError that nobody has cancelled this task for becomes a RuntimeError.

    For calls of third parties: one that awaits a task of its own which was cancelled, that of a
    connection that is closed for instance, lets its CancelledError out. Passed on, it would end
    tasks that nobody wants to end, and count as nobody's failure.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled from within: nobody here has cancelled it") from error


class Pulse:
    """Tells everybody who waits for a condition that something has changed. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Let all waiting tasks look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        """Wait for the next beat."""
        await self._event.wait()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()`` is true; asked now and after every beat."""
        while not condition():
            await self.next()

"""Awaiting what must not be interrupted half way, and what other tasks or threads change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable

    from cacheflow.memory import InFlight

__all__ = ["Pulse", "on_loop_when_idle", "to_the_end"]

T = TypeVar("T")


async def to_the_end(task: Future[T]) -> T:
    """Await ``task`` to its end even if cancelled meanwhile; cancellation is raised afterwards.

    For short, bounded steps of which a half is worse than a delay: clean-up, a copy that a thread
    is making out of memory about to be reused.
    """
    cancelled: asyncio.CancelledError | None = None
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


def on_loop_when_idle(hold: InFlight, callback: Callable[[], None]) -> None:
    """Run ``callback`` on this event loop once nothing is in flight on ``hold`` any more.

    It may never run: hung I/O may outlive the loop.
    """
    loop = asyncio.get_running_loop()

    def ended() -> None:  # on any thread, and perhaps after the loop is gone
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    hold.when_idle(ended)

"""Awaiting what other tasks or threads change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.memory import InFlight

__all__ = ["Pulse", "on_loop_when_idle"]


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

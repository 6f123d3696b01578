"""The event loop told of what ends on other threads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.memory import InFlight

__all__ = ["on_loop_when_idle"]


def on_loop_when_idle(hold: InFlight, callback: Callable[[], None]) -> None:
    """Run ``callback`` on this event loop once nothing is in flight on ``hold`` any more.

    It may never run: hung I/O may outlive the loop.
    """
    loop = asyncio.get_running_loop()

    def ended() -> None:  # on any thread, and perhaps after the loop is gone
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    hold.when_idle(ended)

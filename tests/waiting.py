"""Waiting for what nothing tells: another thread, or a task that nobody here holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until"]

_LIMIT = 30.0


async def until(reached: Callable[[], bool]) -> None:
    """Look again and again.

    Raises:
        TimeoutError: it is not reached in half a minute.
    """
    async with asyncio.timeout(_LIMIT):
        while not reached():  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.001)

"""Cancelling who waits for a thread while the thread is at something, wherever that matters."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Held", "cancelled_during"]

_PATIENCE = 20.0


class Held:
    """``work``, called on a thread, does nothing before it is let go."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.began, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._work = work

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.began.set()
        assert self.go.wait(_PATIENCE)
        try:
            return self._work(*arguments, **named)
        finally:
            self.ended.set()


async def cancelled_during(work: Coroutine[Any, Any, object], held: Held) -> None:
    """Cancel ``work`` while a thread is at ``held`` for it; on return both have ended."""
    task = asyncio.create_task(work)
    assert await asyncio.to_thread(held.began.wait, _PATIENCE)
    task.cancel()
    await asyncio.sleep(0)
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(held.ended.wait, _PATIENCE)

"""A deadline over many awaits of an asynchronous generator, for the price of one timer.

``asyncio.timeout`` must not span a ``yield`` (it would cut off whoever consumes), and one for each
item costs more than the item. Knows nothing of what is awaited.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Cutoff"]


class Cutoff:
    """``with cutoff:`` around each await; TimeoutError once ``seconds`` have passed since it was
    made. :meth:`close` it.

    As with ``asyncio.timeout``, what is awaited sees a cancellation, and one from elsewhere at the
    same time wins.
    """

    __slots__ = ("_cancelling", "_late", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._late = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._timer = asyncio.get_running_loop().call_later(seconds, self._fire)

    def close(self) -> None:
        """No timer from now on."""
        self._timer.cancel()

    def _fire(self) -> None:
        self._late = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> None:
        if self._late:
            raise TimeoutError
        self._task = task = asyncio.current_task()
        assert task is not None, "awaits happen in tasks"
        self._cancelling = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None
        if not self._late or task is None:
            return
        others = task.uncancel() > self._cancelling
        if not others and (kind is None or kind is asyncio.CancelledError):
            raise TimeoutError

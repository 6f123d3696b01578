"""How late the event loop runs what is due: the first sign of something that blocks it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopLag"]

_INTERVAL: Final = 0.1


class LoopLag:
    """Tells ``observe`` ten times a second by how many seconds a timer was late.

    One timer handle and no task: it costs a few microseconds a tick.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin on the running loop; :meth:`stop` ends it."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + _INTERVAL
        self._timer = loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        """Observe nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        late = asyncio.get_running_loop().time() - self._due
        self.start()
        self._observe(max(late, 0.0))

"""Counting I/O in flight on memory, from any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["InFlight"]


class InFlight:
    """A thread-safe :class:`cacheflow.types.Hold`."""

    __slots__ = ("_count", "_idle", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._idle: list[Callable[[], None]] = []

    @property
    def in_flight(self) -> int:
        """Operations that may still touch the memory."""
        return self._count

    def acquire(self) -> None:
        """One more operation may touch the memory from now on."""
        with self._lock:
            self._count += 1

    def release(self) -> None:
        """One operation has really ended.

        Raises:
            RuntimeError: nothing was in flight: someone releases twice.
        """
        with self._lock:
            if self._count == 0:
                raise RuntimeError("hold released more often than acquired")
            self._count -= 1
            if self._count:
                return
            callbacks, self._idle = self._idle, []
        for callback in callbacks:
            callback()

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` once: now if nothing is in flight, else from the releasing thread."""
        with self._lock:
            if self._count:
                self._idle.append(callback)
                return
        callback()

"""The one place that reads time, so that every decision can also run in virtual time."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed origin; never decreases."""
        ...


class SystemClock:
    """The process's monotonic clock."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: for tests and simulation."""

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds

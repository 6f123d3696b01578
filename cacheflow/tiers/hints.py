"""Priorities that fade: how much more (or less) some objects are worth than they look, and until
when. Pure; time is an argument."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.tiers.entry import Entry

__all__ = ["Hints"]


class Hints:
    """A hint counts in full for half of its time, its square root for the other half, then 1."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry, float, float]] = []
        self._latest: dict[Entry, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, entry: Entry, priority: float, ttl: float, now: float) -> None:
        """``entry`` counts ``priority`` times for ``ttl`` seconds; replaces an earlier hint."""
        number = self._latest[entry] = next(self._numbers)
        heappush(self._heap, (now + ttl / 2, number, entry, sqrt(priority), ttl / 2))

    def due(self, now: float) -> list[tuple[Entry, float]]:
        """What has faded by ``now``, and to what."""
        faded: list[tuple[Entry, float]] = []
        while self._heap and self._heap[0][0] <= now:
            when, number, entry, priority, rest = heappop(self._heap)
            if self._latest.get(entry) != number:
                continue  # replaced by a later hint
            faded.append((entry, priority))
            if rest:
                heappush(self._heap, (when + rest, number, entry, 1.0, 0.0))
            else:
                del self._latest[entry]
        return faded

    def next_due(self) -> float | None:
        """When something fades."""
        return self._heap[0][0] if self._heap else None

"""A priority queue with lazy updates: the requests that one resource may turn to.

Entries are *waiting* (to be asked) or *parked* (asked, and had nothing for this resource then).
Changing an entry pushes a new one and leaves the old to be skipped when it surfaces, so every
operation is O(log n) amortised. Knows nothing of what a request is.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

__all__ = ["Queue", "Rank"]

Rank: TypeAlias = tuple[int, float, int]
"""Smaller is more urgent: negated priority, the order's key, the number of the request."""


class Queue:
    """Requests by rank; ranks differ, since no two requests have the same number."""

    __slots__ = ("_parked", "_ranks", "_waiting")

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[Rank, bool]] = {}
        """Rank and whether parked, of every request in the queue."""
        self._waiting: list[tuple[Rank, str]] = []
        self._parked: list[tuple[Rank, str]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, item: str, rank: Rank) -> None:
        """Add ``item``, or give it a new rank; it waits to be asked."""
        if self._ranks.get(item) != (rank, False):
            self._push(item, rank, parked=False)

    def park(self, item: str, rank: Rank) -> None:
        """``item`` was asked and had nothing: do not ask again until :meth:`put`."""
        if self._ranks.get(item) != (rank, True):
            self._push(item, rank, parked=True)

    def is_parked(self, item: str) -> bool:
        """Whether ``item`` is here and parked."""
        known = self._ranks.get(item)
        return known is not None and known[1]

    def drop(self, item: str) -> None:
        """Take ``item`` out."""
        self._ranks.pop(item, None)

    def waiting(self) -> tuple[Rank, str] | None:
        """The most urgent item that waits to be asked."""
        return self._best(self._waiting, parked=False)

    def parked(self) -> tuple[Rank, str] | None:
        """The most urgent item that was asked in vain."""
        return self._best(self._parked, parked=True)

    def _push(self, item: str, rank: Rank, *, parked: bool) -> None:
        self._ranks[item] = (rank, parked)
        heap = self._parked if parked else self._waiting
        if heap and heap[0][1] == item:
            heapreplace(heap, (rank, item))  # Whose turn it is has a new rank most of the time.
            return
        heappush(heap, (rank, item))
        if len(heap) > 64 + 4 * len(self._ranks):
            self.tidy()

    def tidy(self) -> None:
        """Clear entries that were left behind away at once, so that nobody has to skip them."""
        for heap, parked in ((self._waiting, False), (self._parked, True)):
            heap[:] = [(r, i) for i, (r, is_parked) in self._ranks.items() if is_parked is parked]
            heapify(heap)

    def _best(self, heap: list[tuple[Rank, str]], *, parked: bool) -> tuple[Rank, str] | None:
        while heap:
            rank, item = heap[0]
            if self._ranks.get(item) == (rank, parked):
                return heap[0]
            heappop(heap)
        return None

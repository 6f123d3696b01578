"""Cost-aware: the least (seconds saved per byte) x (evidence of reuse) leaves first.

Evidence is uses that fade: each use counts less the longer ago it was. As everything fades at one
rate, the order between keys that nobody touches never changes, so one heap over
``log(worth) + log(uses) + age of the policy when they were counted`` is enough and every operation
is O(log n): combined recency and frequency as in LRFU (Lee et al., IEEE ToC 50(12), 2001), with the
cost per byte of GreedyDual-Size (Cao and Irani, USITS 1997).

The policy's age is how often its contents have been evicted, not seconds: a small tier forgets
faster than a large one, as it must, and nothing has to be set for a particular traffic.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import exp, log
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from cacheflow.tiers.eviction.protocol import Spared

__all__ = ["CostAware"]

K = TypeVar("K", bound=Hashable)

_LEAST: Final = 1e-12
"""Worth and uses below this are this: their logarithm is wanted."""
_FADE: Final = 3.0 * log(2.0)
"""How much evidence fades in one turnover: to an eighth. Slower forgets finished conversations too
late where the store holds most of what is used, faster keeps nothing long enough where it does not
(benchmarks/bench_placement.py)."""


class _Item:
    __slots__ = ("evidence", "nbytes", "order", "worth")

    def __init__(self, nbytes: int, worth: float, evidence: float) -> None:
        self.nbytes = nbytes
        self.worth = worth
        """Its logarithm."""
        self.evidence = evidence
        """Logarithm of the uses, counted as of age 0."""
        self.order = -1
        """Of its entry in the heap; older entries are void."""


class CostAware(Generic[K]):
    """``fade``: what a turnover of the contents takes off the logarithm of evidence."""

    def __init__(self, fade: float = _FADE) -> None:
        self._fade = fade
        self._items: dict[K, _Item] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = count()
        self._bytes = 0
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def insert(self, key: K, nbytes: int, worth: float = 1.0, uses: float = 1.0) -> None:
        self._bytes += nbytes
        evidence = log(max(uses, _LEAST)) + self._fade * self._age
        self._items[key] = item = _Item(nbytes, log(max(worth, _LEAST)), evidence)
        self._push(key, item)

    def touch(self, key: K, weight: float = 1.0, worth: float | None = None) -> None:
        item = self._items.get(key)
        if item is None:
            return
        now = self._fade * self._age
        if worth is not None:
            item.worth = log(max(worth, _LEAST))
        if weight > 0.0:
            item.evidence = log(exp(item.evidence - now) + weight) + now
        self._push(key, item)

    def remove(self, key: K) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self._bytes -= item.nbytes

    def victims(self, nbytes: int, spared: Spared[K]) -> list[K]:
        leaving: list[K] = []
        kept: list[tuple[float, int, K]] = []
        gathered, held = 0, self._bytes
        while gathered < nbytes and self._heap:
            entry = heappop(self._heap)
            item = self._items.get(entry[2])
            if item is None or item.order != entry[1]:
                continue
            if spared(entry[2]):
                kept.append(entry)
            else:
                gathered += item.nbytes
                leaving.append(entry[2])
                self.remove(entry[2])
        for entry in kept:
            heappush(self._heap, entry)
        if gathered:
            self._age += gathered / held
        return leaving

    def _push(self, key: K, item: _Item) -> None:
        item.order = next(self._order)
        heappush(self._heap, (item.worth + item.evidence, item.order, key))
        if len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [e for e in self._heap if self._is_valid(e)]
            heapify(self._heap)

    def _is_valid(self, entry: tuple[float, int, K]) -> bool:
        item = self._items.get(entry[2])
        return item is not None and item.order == entry[1]

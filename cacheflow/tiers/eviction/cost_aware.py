"""Cost-aware: the least (seconds saved per byte) x (evidence of reuse) leaves first.

Evidence is uses that fade: each use counts less the longer ago it was. As everything fades at one
rate, the order between keys that nobody touches never changes, so one heap over
``log(worth) + log(uses) + age of the policy when they were counted`` is enough and every operation
is O(log n): combined recency and frequency as in LRFU (Lee et al., IEEE ToC 50(12), 2001), with the
cost per byte of GreedyDual-Size (Cao and Irani, USITS 1997).

The policy's age is how often its contents have been evicted, not seconds: a small tier forgets
faster than a large one, as it must, and nothing has to be set for a particular traffic.

What a use saves only matters where something that will be used has to go. So the policy remembers
the names of what it evicted (ARC's idea, Megiddo and Modha, FAST 2003), and how much of what is
used had left before. Where that is next to nothing it is *calm*: the last use alone decides, as in
LRU, since worth would only mix what is over with what goes on. There are two heaps, one for each
way, and every key is in both. A hint's boost counts in either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import exp, log
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.tiers.eviction.protocol import Spared

__all__ = ["CostAware"]

K = TypeVar("K", bound=Hashable)

_LEAST: Final = 1e-12
"""Worth and uses below this are this: their logarithm is wanted."""
_FADE: Final = 3.0 * log(2.0)
"""How much evidence fades in one turnover: to an eighth. Slower forgets finished conversations too
late, faster keeps nothing long enough (benchmarks/bench_placement.py)."""
_CALM: Final = 0.10
_TIGHT: Final = 0.18
"""Share of the used bytes that had been evicted below which worth does not count any more, and from
which on it does."""
_PRIOR: Final = 0.002
"""Share of the contents: so much use, all of it evicted before, is taken to have been seen when the
first eviction comes."""


class _Item:
    __slots__ = ("boost", "evidence", "last_use", "nbytes", "order", "worth")

    def __init__(
        self, nbytes: int, worth: float, evidence: float, last_use: float, boost: float
    ) -> None:
        self.nbytes = nbytes
        self.worth = worth
        self.evidence = evidence
        """Uses, counted as of age 0."""
        self.last_use = last_use
        """The policy's age then."""
        self.boost = boost
        self.order = -1
        """Of its entries in the heaps; older entries are void."""

    @property
    def scores(self) -> tuple[float, float]:
        """While it is calm, and while it is tight. Logarithms, as all of the above."""
        return self.last_use + self.boost, self.worth + self.evidence + self.boost


class _Pressure:
    """Whether what is used had often been evicted before, over about the last turnover."""

    def __init__(self) -> None:
        self.is_tight = True
        self._there = self._gone = 0.0
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Hashes of keys: a wrong match counts a use wrongly, nothing else."""

    def used(self, nbytes: float) -> None:
        """Something that is there was used; before anything ever had to go that says nothing."""
        if self._there + self._gone:
            self._there += nbytes
            self._weigh()

    def came(self, key: Hashable, nbytes: float) -> None:
        """It was wanted, and had to be stored."""
        if self._ghosts.pop(hash(key), self) is None:
            self._gone += nbytes
            self._weigh()

    def evicted(self, keys: Sequence[Hashable], nbytes: float, held: float, most: int) -> None:
        """``nbytes`` of ``held`` left. ``most``: names worth remembering."""
        self._ghosts.update((hash(key), None) for key in keys)
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)
        if not self._there + self._gone:
            self._gone = _PRIOR * held
        self._there *= exp(-nbytes / held)
        self._gone *= exp(-nbytes / held)

    def _weigh(self) -> None:
        limit = _CALM if self.is_tight else _TIGHT
        self.is_tight = self._gone > limit * (self._gone + self._there)


class CostAware(Generic[K]):
    """Belongs to one tier, or to one tenant's part of it."""

    def __init__(self) -> None:
        self._pressure = _Pressure()
        self._items: dict[K, _Item] = {}
        self._heaps: tuple[list[tuple[float, int, K]], ...] = ([], [])
        """By the scores of an item: while it is calm, and while it is tight."""
        self._order = count()
        self._bytes = 0
        self._age = 0.0
        """How much what has always been there has faded."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_tight(self) -> bool:
        """Whether worth counts, or recency alone."""
        return self._pressure.is_tight

    def insert(
        self, key: K, nbytes: int, worth: float = 1.0, uses: float = 1.0, boost: float = 1.0
    ) -> None:
        self._pressure.came(key, nbytes)
        self._bytes += nbytes
        evidence = _log(uses) + self._age
        item = _Item(nbytes, _log(worth), evidence, self._age, _log(boost))
        self._items[key] = item
        self._push(key, item)

    def touch(
        self, key: K, weight: float = 1.0, worth: float | None = None, boost: float | None = None
    ) -> None:
        item = self._items.get(key)
        if item is None:
            return
        if worth is not None:
            item.worth = _log(worth)
        if boost is not None:
            item.boost = _log(boost)
        if weight > 0.0:
            self._pressure.used(item.nbytes)
            item.evidence = log(exp(item.evidence - self._age) + weight) + self._age
            item.last_use = self._age
        self._push(key, item)

    def remove(self, key: K) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self._bytes -= item.nbytes

    def victims(self, nbytes: int, spared: Spared[K]) -> list[K]:
        heap = self._heaps[self.is_tight]
        leaving: list[K] = []
        kept: list[tuple[float, int, K]] = []
        gathered, held = 0, self._bytes
        while gathered < nbytes and heap:
            entry = heappop(heap)
            if not self._is_valid(entry):
                continue
            if spared(entry[2]):
                kept.append(entry)
            else:
                gathered += self._items[entry[2]].nbytes
                leaving.append(entry[2])
                self.remove(entry[2])
        for entry in kept:
            heappush(heap, entry)
        if gathered:
            self._pressure.evicted(leaving, gathered, held, max(len(self._items), 16))
            self._age += _FADE * gathered / held
        return leaving

    def _push(self, key: K, item: _Item) -> None:
        item.order = next(self._order)
        for heap, score in zip(self._heaps, item.scores, strict=True):
            heappush(heap, (score, item.order, key))
            if len(heap) > 2 * len(self._items) + 64:
                heap[:] = [e for e in heap if self._is_valid(e)]
                heapify(heap)

    def _is_valid(self, entry: tuple[float, int, K]) -> bool:
        item = self._items.get(entry[2])
        return item is not None and item.order == entry[1]


def _log(value: float) -> float:
    return log(max(value, _LEAST))

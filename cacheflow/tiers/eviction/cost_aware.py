"""Cost-aware: the least (seconds saved per byte) x (evidence of reuse) leaves first.

Evidence is a use that fades: it counts less the longer ago it was. As everything fades at one rate,
the order between keys that nobody touches never changes, so one heap over ``log(worth) +
log(chance) + age of the policy when it was used`` is enough and every operation is O(log n): the
cost per byte of GreedyDual-Size (Cao and Irani, USITS 1997), with a clock of its own.

Of all uses that one counts which says most: one that would have loaded the key outweighs any later
one that would have recomputed it, until it has faded. Sums would not do: the head of a prefix has
been used as often as the prefix was, so what is in the middle would leave first. In this way a
prefix is given up from its front on, but for what other prompts begin with too.

The policy's age is how often its contents have been evicted, not seconds: a small tier forgets
faster than a large one, as it must, and nothing has to be set for a particular traffic.

How much a use saves only matters where something that will be used has to go. So the policy
remembers the names of what it evicted (ARC's idea, Megiddo and Modha, FAST 2003), and how much of
what is used had left before. Where that is next to nothing it is *calm*: worth does not count, as
it would only mix what is over with what goes on. There are two heaps, one for each way, and every
key is in both. A hint's boost counts in either.

What would leave before all others if it came in is not let in at all: it would only be written, and
deleted with the next.
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
"""Worth and chances below this are this: their logarithm is wanted."""
_FADE: Final = 2.0 * log(2.0)
"""How much evidence fades in one turnover: to a quarter. Slower forgets finished conversations too
late, faster makes too little of what uses save (benchmarks/bench_placement.py)."""
_CALM: Final = 0.10
_TIGHT: Final = 0.18
"""Share of the used bytes that had been evicted below which worth does not count any more, and from
which on it does."""
_PRIOR: Final = 0.002
"""Share of the contents: so much use, all of it evicted before, is taken to have been seen when the
first eviction comes."""


class _Item:
    __slots__ = ("boost", "nbytes", "order", "use", "worth")

    def __init__(self, nbytes: int, worth: float, use: float, boost: float) -> None:
        self.nbytes = nbytes
        self.worth = worth
        self.use = use
        """The most that a use says: its chance, as of age 0."""
        self.boost = boost
        self.order = -1
        """Of its entries in the heaps; older entries are void."""

    @property
    def scores(self) -> tuple[float, float]:
        """While it is calm, and while it is tight. Logarithms, as all of the above."""
        calm = self.use + self.boost
        return calm, calm + self.worth


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
        item = _Item(nbytes, _log(worth), self._use(uses), _log(boost))
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
            item.use = max(item.use, self._use(weight))
        self._push(key, item)

    def admits(self, nbytes: int, worth: float = 1.0, uses: float = 1.0) -> bool:
        heap = self._heaps[self.is_tight]
        while heap and not self._is_valid(heap[0]):
            heappop(heap)
        score = _Item(nbytes, _log(worth), self._use(uses), 0.0).scores[self.is_tight]
        if not heap or heap[0][0] <= score:
            return True
        # As if it had come in and left: what is there grows old beside what is turned away.
        self._age += _FADE * nbytes / self._bytes * min(uses, 1.0)
        return False

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

    def _use(self, chance: float) -> float:
        """What a use says that would load with ``chance``; more than one is no more than one."""
        return self._age + min(_log(chance), 0.0)

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

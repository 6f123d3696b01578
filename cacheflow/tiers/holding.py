"""What keeps an object from being evicted: leases and reads (for a moment), pins (to the last).

Pure bookkeeping of bytes by tenant; time is an argument. Knows no order of eviction.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.tiers.entry import Entry

__all__ = ["Holds", "Pins"]


class Holds:
    """Entries that must not be evicted now: leased by a lookup, or being read.

    ``most``: leases at once; the oldest ends early for one more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._leases: OrderedDict[Entry, float] = OrderedDict()
        """When they end, in that order."""
        self._bytes: defaultdict[bytes | None, int] = defaultdict(int)
        """By tenant, and of all under None."""

    def __contains__(self, entry: Entry) -> bool:
        return entry.reads > 0 or entry in self._leases

    @property
    def leases(self) -> int:
        """How many there are."""
        return len(self._leases)

    def nbytes(self, tenant: bytes | None = None) -> int:
        """Bytes held of ``tenant``, or of all."""
        return self._bytes.get(tenant, 0)

    def lease(self, entry: Entry, until: float) -> None:
        """Nobody evicts it before ``until``; later calls never give an earlier time."""
        if entry not in self:
            self._add(entry, entry.nbytes)
        self._leases[entry] = until
        self._leases.move_to_end(entry)
        while len(self._leases) > self._most:
            self._end(next(iter(self._leases)))

    def end_leases(self, now: float) -> None:
        """Those that are over by ``now`` end."""
        while self._leases:
            entry, until = next(iter(self._leases.items()))
            if until > now:
                return
            self._end(entry)

    def begin_read(self, entry: Entry) -> None:
        """A load of it begins; :meth:`end_read` must follow."""
        if entry not in self:
            self._add(entry, entry.nbytes)
        entry.reads += 1

    def end_read(self, entry: Entry) -> None:
        """The load ended. An entry that was forgotten meanwhile has no reads any more."""
        if entry.reads:
            entry.reads -= 1
            if entry not in self:
                self._add(entry, -entry.nbytes)

    def forget(self, entry: Entry) -> None:
        """The object is gone."""
        if entry in self:
            self._leases.pop(entry, None)
            entry.reads = 0
            self._add(entry, -entry.nbytes)

    def _end(self, entry: Entry) -> None:
        del self._leases[entry]
        if not entry.reads:
            self._add(entry, -entry.nbytes)

    def _add(self, entry: Entry, nbytes: int) -> None:
        for name in (None, entry.tenant):
            self._bytes[name] += nbytes
            if not self._bytes[name]:
                del self._bytes[name]


class Pins:
    """Entries that leave last, ``budget`` bytes of each tenant at most."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._heap: list[tuple[float, int, Entry]] = []
        """By when they end; those whose entry says another time are void."""
        self._bytes: defaultdict[bytes, int] = defaultdict(int)
        self._count = 0
        self._numbers = count()

    def __contains__(self, entry: Entry) -> bool:
        return entry.pinned_until > 0.0

    def __len__(self) -> int:
        return self._count

    def nbytes(self, tenant: bytes) -> int:
        """Bytes that ``tenant`` has pinned."""
        return self._bytes.get(tenant, 0)

    def add(self, entry: Entry, until: float) -> bool:
        """Pin, or pin longer; False if that is over the tenant's budget."""
        if entry in self:
            until = max(until, entry.pinned_until)
        elif self.nbytes(entry.tenant) + entry.nbytes > self._budget:
            return False
        else:
            self._bytes[entry.tenant] += entry.nbytes
            self._count += 1
        entry.pinned_until = until
        heappush(self._heap, (until, next(self._numbers), entry))
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [pin for pin in self._heap if _is_valid(pin)]
            heapify(self._heap)
        return True

    def forget(self, entry: Entry) -> None:
        """It is pinned no more."""
        if entry in self:
            entry.pinned_until = 0.0
            self._count -= 1
            self._bytes[entry.tenant] -= entry.nbytes
            if not self._bytes[entry.tenant]:
                del self._bytes[entry.tenant]

    def ended(self, now: float) -> list[Entry]:
        """Unpin those whose time is over."""
        over: list[Entry] = []
        while self._heap and self._heap[0][0] <= now:
            pin = heappop(self._heap)
            if _is_valid(pin):
                self.forget(pin[2])
                over.append(pin[2])
        return over

    def broken(self, nbytes: int, may_leave: Callable[[Entry], bool]) -> list[Entry]:
        """Unpin ``nbytes`` before their time, those first whose pin would end first."""
        over: list[Entry] = []
        kept: list[tuple[float, int, Entry]] = []
        gathered = 0
        while gathered < nbytes and self._heap:
            pin = heappop(self._heap)
            if not _is_valid(pin):
                continue
            if may_leave(pin[2]):
                self.forget(pin[2])
                over.append(pin[2])
                gathered += pin[2].nbytes
            else:
                kept.append(pin)
        for pin in kept:
            heappush(self._heap, pin)
        return over


def _is_valid(pin: tuple[float, int, Entry]) -> bool:
    return pin[2].pinned_until == pin[0]

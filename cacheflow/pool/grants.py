"""Who may touch which slot until when: leases to read, and slots that are to be filled.

Each grant keeps its slot's memory from being used again; what a transport thread is touching has a
hold of its own besides. Belongs to the event loop, except :meth:`Grants.enter`, which any thread
may call. Time is an argument. Knows neither objects nor their order of eviction.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.pool.slots import Slot
    from cacheflow.types import Hold

__all__ = ["Grant", "Grants"]

_Name: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class Grant:
    """Leases of one client on one slot, or its right to fill it."""

    client: str
    slot: Slot
    until: float
    writing: bool = False
    count: int = 0
    """Leases that are to be released one by one."""
    looked_up: bool = False
    """One more, of lookups."""
    is_late: bool = False
    """It should have been filled by now."""


class Grants:
    """``changed`` is told how many grants there are; ``ended`` of each lease that is over."""

    def __init__(
        self,
        changed: Callable[[int], None] = lambda number: None,
        ended: Callable[[Slot], None] = lambda slot: None,
    ) -> None:
        self._changed = changed
        self._ended = ended
        self._lock = threading.Lock()
        """Guards the mapping: a grant that was found keeps its slot until a hold is taken."""
        self._reading: OrderedDict[_Name, Grant] = OrderedDict()
        self._writing: OrderedDict[_Name, Grant] = OrderedDict()
        """Both by when they end."""
        self._late: dict[_Name, Grant] = {}
        """What should have been filled by now, and may still be written to."""
        self.uncommitted_bytes = 0
        """Of slots to be filled that are not late."""

    @property
    def leases(self) -> int:
        """Slots leased, counted once a client."""
        return len(self._reading)

    @property
    def in_use(self) -> int:
        """Slots that somebody is reading or filling: looked up alone does not count."""
        reading = sum(grant.count > 0 for grant in self._reading.values())
        return reading + self.uncommitted

    @property
    def uncommitted(self) -> int:
        """Slots to be filled."""
        return len(self._writing) + len(self._late)

    def is_filling(self, client: str) -> bool:
        """Whether ``client`` has slots to fill, late ones included."""
        return any(name[0] == client for grants in (self._writing, self._late) for name in grants)

    # -- giving --------------------------------------------------------------------------------

    def lease(self, client: str, slot: Slot, until: float, *, looked_up: bool = False) -> bool:
        """``client`` may read ``slot``; True if it could not before."""
        name = (client, slot.generation)
        with self._lock:
            is_new = (grant := self._reading.get(name)) is None
            if grant is None:
                grant = self._reading[name] = Grant(client, slot, until)
            grant.until = until
            grant.count += not looked_up
            grant.looked_up |= looked_up
            self._reading.move_to_end(name)
        if is_new:
            slot.hold.acquire()
            self._tell()
        return is_new

    def to_fill(self, client: str, slot: Slot, until: float) -> None:
        """``client`` may write ``slot``, which nobody can see yet."""
        with self._lock:
            self._writing[client, slot.generation] = Grant(client, slot, until, writing=True)
        slot.hold.acquire()
        self.uncommitted_bytes += slot.info.nbytes
        self._tell()

    def enter(
        self, client: str, generation: int, offset: int, nbytes: int, *, writing: bool
    ) -> Hold | None:
        """See :class:`cacheflow.pool.Access`. From any thread."""
        name = (client, generation)
        with self._lock:
            if writing:
                grant = self._writing.get(name) or self._late.get(name)
            else:
                grant = self._reading.get(name)
            if grant is None:
                return None
            slot = grant.slot
            start = offset - slot.offset
            if start < 0 or nbytes < 0 or start + nbytes > slot.info.nbytes:
                return None
            slot.hold.acquire()
            return slot.hold

    # -- taking back ---------------------------------------------------------------------------

    def release(self, client: str, generation: int, *, looked_up: bool = False) -> None:
        """One lease less, if there is one still."""
        with self._lock:
            grant = self._reading.get((client, generation))
            if grant is None:
                return
            if looked_up:
                grant.looked_up = False
            else:
                grant.count = max(grant.count - 1, 0)
            is_over = not (grant.count or grant.looked_up)
            if is_over:
                del self._reading[client, generation]
        if is_over:
            self._over(grant)

    def filled(self, client: str, generation: int) -> Slot | None:
        """The client writes no more; the slot, if it was his to fill."""
        with self._lock:
            name = (client, generation)
            grant = self._writing.pop(name, None) or self._late.pop(name, None)
        if grant is None:
            return None
        self._over(grant)
        return grant.slot

    def expired(self, now: float) -> list[Grant]:
        """End the leases that are over. Slots that should have been filled by now are named once;
        they stay with their clients, who may be writing, but nobody waits for them any more."""
        while self._reading:
            name, grant = next(iter(self._reading.items()))
            if grant.until > now:
                break
            with self._lock:
                del self._reading[name]
            self._over(grant)
        late = []
        while self._writing:
            name, grant = next(iter(self._writing.items()))
            if grant.until > now:
                break
            with self._lock:
                self._late[name] = self._writing.pop(name)
            grant.is_late = True
            self.uncommitted_bytes -= grant.slot.info.nbytes
            late.append(grant)
        return late

    def next_end(self) -> float | None:
        """When the first grant is over."""
        firsts = [next(iter(g.values())).until for g in (self._reading, self._writing) if g]
        return min(firsts, default=None)

    def dismiss(self, client: str) -> list[Slot]:
        """All leases of ``client`` end, and so do its rights to write; returns those slots."""
        unfilled = []
        for grants in (self._reading, self._writing, self._late):
            with self._lock:
                mine = [grants.pop(name) for name in list(grants) if name[0] == client]
            for grant in mine:
                self._over(grant)
                if grant.writing:
                    unfilled.append(grant.slot)
        return unfilled

    def _over(self, grant: Grant) -> None:
        slot = grant.slot
        slot.hold.release()
        if not grant.writing:
            self._ended(slot)
        elif not grant.is_late:
            self.uncommitted_bytes -= slot.info.nbytes
        self._tell()

    def _tell(self) -> None:
        self._changed(len(self._reading) + self.uncommitted)

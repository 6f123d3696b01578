"""Where the objects of one store lie, as long as a lookup's lease keeps them there.

A place belongs to the connection that it was leased on: generations and offsets of another one may
mean other bytes. Nothing is given back under a transfer that has begun. Belongs to the loop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.pool import Link
    from cacheflow.storage_backends.pool.guard import Guard
    from cacheflow.types import ObjectKey

__all__ = ["Place", "Places"]

_MOST: Final = 16384
_FRESH: Final = 0.5
"""Share of a lease within which a read begins without a lease of its own."""
_SURE: Final = 0.9
"""Share of a lease after which the store is asked whether it still holds."""


@dataclass(slots=True, eq=False)
class Place:
    """A leased slot. Times are on our clock, from before the store was asked."""

    offset: int
    nbytes: int
    generation: int
    link: Link | None
    """Over which it can be read, and no other."""
    fresh_until: float
    """Reads that begin later need another lease."""
    sure_until: float
    """Reads that end later are to be confirmed."""
    readers: list[Guard] = field(default_factory=list)
    """Of transfers that may be under way."""

    @classmethod
    def leased(
        cls, slot: tuple[int, int, int], link: Link | None, asked: float, seconds: float
    ) -> Place:
        """``slot``: offset, bytes, generation; leased for ``seconds`` since ``asked``."""
        return cls(*slot, link, asked + _FRESH * seconds, asked + _SURE * seconds)


class Places:
    """Of lookups; ``give_back`` tells the store that a slot need not be kept for them."""

    def __init__(self, give_back: Callable[[Place], None]) -> None:
        self._give_back = give_back
        self._places: OrderedDict[ObjectKey, Place] = OrderedDict()

    def find(self, key: ObjectKey) -> Place | None:
        """What was known last."""
        return self._places.get(key)

    def put(self, key: ObjectKey, place: Place) -> None:
        """A lookup found it."""
        known = self._places.get(key)
        if known is not None and known.generation == place.generation:
            # The lease is the same one, renewed, also for those who are reading.
            place.readers = [guard for guard in known.readers if guard.in_use]
        self._places[key] = place
        self._places.move_to_end(key)
        while len(self._places) > _MOST:
            self._places.popitem(last=False)

    def forget(self, key: ObjectKey) -> None:
        """Somebody here deletes or replaces the object: its slot need not be kept for us, once
        those who are reading it have done so."""
        place = self._places.pop(key, None)
        if place is None:
            return
        place.fresh_until = 0.0
        left = {guard for guard in place.readers if guard.in_use}
        if not left:
            self._give_back(place)
        for guard in list(left):
            guard.when_over(partial(self._read, key, place, left, guard))

    def clear(self) -> None:
        """The connection is over, and so are its leases."""
        self._places.clear()

    def _read(self, key: ObjectKey, place: Place, left: set[Guard], guard: Guard) -> None:
        left.discard(guard)
        again = self._places.get(key)
        if not left and (again is None or again.generation != place.generation):
            self._give_back(place)

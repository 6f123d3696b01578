"""Which objects change while somebody looks at the store, or changes them: then nobody knows.

Without that, a lookup that was answered before a delete and heard after it would bring the object
back into the index; and of a delete and a store that overlap the one that was answered last need
not be the one that happened last. Belongs to one event loop.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cacheflow.types import ObjectKey

__all__ = ["Changes", "Look"]


class Look:
    """One look at the store, or one change of it, from when it was asked for."""

    def __init__(self, stores: Counter[ObjectKey], deletes: Counter[ObjectKey]) -> None:
        self._stores, self._deletes = stores, deletes
        """Under way."""
        self._stored: set[ObjectKey] = set()
        self._deleted: set[ObjectKey] = set()
        """Since it was asked for."""

    def ended(self, keys: set[ObjectKey], *, is_store: bool) -> None:
        """Changes of ``keys`` have ended since."""
        (self._stored if is_store else self._deleted).update(keys)

    def is_news(self, key: ObjectKey) -> bool:
        """Whether what it shows of ``key`` is how things are: nobody has changed it meanwhile."""
        return not (self.was_stored(key) or self.was_deleted(key))

    def was_stored(self, key: ObjectKey) -> bool:
        """Whether somebody has stored ``key`` meanwhile, or is about to."""
        return key in self._stored or key in self._stores

    def was_deleted(self, key: ObjectKey) -> bool:
        """Whether somebody has deleted ``key`` meanwhile, or is about to."""
        return key in self._deleted or key in self._deletes

    def is_only_store(self, key: ObjectKey) -> bool:
        """Of a store that ends: whether nobody else has changed ``key`` meanwhile."""
        return key not in self._stored and self._stores[key] == 1 and not self.was_deleted(key)


class Changes:
    """Stores and deletes under way, and who looks meanwhile."""

    def __init__(self) -> None:
        self._stores: Counter[ObjectKey] = Counter()
        self._deletes: Counter[ObjectKey] = Counter()
        self._looks: list[Look] = []

    @contextmanager
    def look(self) -> Iterator[Look]:
        """From before the store is asked until its answer has been dealt with."""
        look = Look(self._stores, self._deletes)
        self._looks.append(look)
        try:
            yield look
        finally:
            self._looks.remove(look)

    @contextmanager
    def storing(self, keys: Iterable[ObjectKey]) -> Iterator[Look]:
        """While ``keys`` are being stored. What came of it is to be dealt with inside, and only to
        be believed where it :meth:`~Look.is_only_store`."""
        with self._changing(keys, self._stores) as change:
            yield change

    @contextmanager
    def deleting(self, keys: Iterable[ObjectKey]) -> Iterator[Look]:
        """While ``keys`` are being deleted: inside, what :meth:`~Look.was_stored` may be there."""
        with self._changing(keys, self._deletes) as change:
            yield change

    @contextmanager
    def _changing(self, keys: Iterable[ObjectKey], under_way: Counter[ObjectKey]) -> Iterator[Look]:
        some = set(keys)
        under_way.update(some)
        try:
            with self.look() as change:
                yield change
        finally:
            for key in some:
                under_way[key] -= 1
                if not under_way[key]:
                    del under_way[key]
            for look in self._looks:
                look.ended(some, is_store=under_way is self._stores)

"""Which objects change while somebody looks at the store: their answer about these is no news.

Without that, a lookup that was answered before a delete and heard after it would bring the object
back into the index. Belongs to one event loop.
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
    """One look at the store, from when it was asked for."""

    def __init__(self, under_way: Counter[ObjectKey]) -> None:
        self._under_way = under_way
        self._ended: set[ObjectKey] = set()

    def ended(self, keys: Iterable[ObjectKey]) -> None:
        """Changes of ``keys`` have ended since."""
        self._ended.update(keys)

    def is_news(self, key: ObjectKey) -> bool:
        """Whether what it shows of ``key`` is how things are: nobody has changed it meanwhile."""
        return key not in self._ended and key not in self._under_way


class Changes:
    """Stores and deletes under way, and who looks meanwhile."""

    def __init__(self) -> None:
        self._under_way: Counter[ObjectKey] = Counter()
        self._looks: list[Look] = []

    @contextmanager
    def look(self) -> Iterator[Look]:
        """From before the store is asked until its answer has been dealt with."""
        look = Look(self._under_way)
        self._looks.append(look)
        try:
            yield look
        finally:
            self._looks.remove(look)

    @contextmanager
    def of(self, keys: Iterable[ObjectKey]) -> Iterator[None]:
        """While ``keys`` are being stored or deleted."""
        keys = tuple(keys)
        self._under_way.update(keys)
        try:
            yield
        finally:
            for key in keys:
                self._under_way[key] -= 1
                if not self._under_way[key]:
                    del self._under_way[key]
            for look in self._looks:
                look.ended(keys)

"""Least recently used: what was not touched for longest leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from cacheflow.tiers.eviction.protocol import Spared

__all__ = ["Lru"]

K = TypeVar("K", bound=Hashable)


class Lru(Generic[K]):
    """Ignores what a use is worth; a touch of no weight is none."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[K, int] = OrderedDict()
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._sizes)

    def insert(
        self, key: K, nbytes: int, worth: float = 1.0, uses: float = 1.0, boost: float = 1.0
    ) -> None:
        self._sizes[key] = nbytes

    def admits(self, nbytes: int, worth: float = 1.0, uses: float = 1.0) -> bool:
        return True

    def touch(
        self, key: K, weight: float = 1.0, worth: float | None = None, boost: float | None = None
    ) -> None:
        if weight > 0.0 and key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: K) -> None:
        self._sizes.pop(key, None)

    def victims(self, nbytes: int, spared: Spared[K]) -> list[K]:
        leaving: list[K] = []
        gathered = 0
        for key, size in self._sizes.items():
            if gathered >= nbytes:
                break
            if not spared(key):
                leaving.append(key)
                gathered += size
        for key in leaving:
            del self._sizes[key]
        return leaving

"""What an eviction policy is: an order in which things leave. Pure; it knows no clock and no I/O.

A policy sees keys, sizes, uses and what a use is worth. Leases, pins, quotas and deadlines are the
catalogue's business: it passes ``spared`` and takes pinned keys out while they are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias, TypeVar

__all__ = ["EvictionPolicy", "Spared"]

K = TypeVar("K", bound=Hashable)
Spared: TypeAlias = Callable[[K], bool]


class EvictionPolicy(Protocol[K]):
    """Every operation is O(log n) or better, amortised, and O(keys that are spared) beside that."""

    def __len__(self) -> int:
        """Keys that may leave."""
        ...

    def insert(
        self, key: K, nbytes: int, worth: float = 1.0, uses: float = 1.0, boost: float = 1.0
    ) -> None:
        """``key`` came in and is not there yet.

        ``worth`` (> 0): what one use saves, per byte, on any scale that is the same for all keys.
        ``uses``: evidence so far. ``boost`` (> 0): somebody's wish that it count so many times.
        """
        ...

    def admits(self, nbytes: int, worth: float = 1.0, uses: float = 1.0) -> bool:
        """Whether something is worth the place of what would leave for it; asked when it is full.

        False counts as if it had come in and been evicted at once.
        """
        ...

    def touch(
        self, key: K, weight: float = 1.0, worth: float | None = None, boost: float | None = None
    ) -> None:
        """``key`` was used (nothing happens if it is not there).

        ``weight``: evidence that the use would really have saved something, 0 to 1 as a rule.
        ``worth`` and ``boost``: replace what was said before.
        """
        ...

    def remove(self, key: K) -> None:
        """``key`` left for another reason than eviction (nothing happens if it is not there)."""
        ...

    def victims(self, nbytes: int, spared: Spared[K]) -> list[K]:
        """Take out what should leave first, until ``nbytes`` are gathered or nothing is left.

        Keys for which ``spared`` is true stay, at the place they have.
        """
        ...

"""Objects whose bytes could not be had although they were listed: misses, for a while.

Without that a request would be promised the same bad object over and over. Knows no tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cacheflow.types import ObjectKey

__all__ = ["Doubts"]

_SECONDS: Final = 60.0
_MOST: Final = 4096


class Doubts:
    """At most a few thousand; the oldest is forgotten first."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[ObjectKey, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: ObjectKey, now: float) -> None:
        """``key`` could not be had."""
        self._until.pop(key, None)  # so that the order stays that of time
        while len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]
        self._until[key] = now + _SECONDS

    def dispel(self, key: ObjectKey) -> None:
        """``key`` was stored anew, or is gone."""
        self._until.pop(key, None)

    def about(self, key: ObjectKey, now: float) -> bool:
        """Whether ``key`` is to be taken for a miss."""
        until = self._until.get(key)
        if until is not None and until <= now:
            del self._until[key]
            return False
        return until is not None

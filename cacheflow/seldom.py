"""Lines of a log that would come for every request while something lasts: told now and then.

Counts, and asks a clock; knows neither logs nor what is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cacheflow.clock import Clock

__all__ = ["Seldom"]

_SECONDS: Final = 60.0


class Seldom:
    """The first of a kind is told at once; then all that came since, at most once a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, tuple[float, int]] = {}
        """By kind: when the next may be told, and how many were not told yet."""

    def add(self, kind: str, count: int) -> int:
        """There are ``count`` more of ``kind``; of how many to tell now (0: say nothing)."""
        now = self._clock.now()
        due, held = self._held.get(kind, (now, 0))
        if now < due:
            self._held[kind] = due, held + count
            return 0
        self._held[kind] = now + _SECONDS, 0
        return held + count

"""How stores are made behind the requests: what real savers and simulated ones have in common.

Pure: time is an argument.
"""

from __future__ import annotations

from math import inf
from typing import Final

__all__ = ["AT_ONCE", "MAX_QUEUED", "MOMENT", "GivingWay", "stores_at_once"]

AT_ONCE: Final = 4
"""Stores in flight in one tier, fewer where the tier suggests so."""
MAX_QUEUED: Final = 4096
"""Chunks of one tier that may wait at a time; more are dropped."""
MOMENT: Final = 0.01
"""Seconds: a store that takes longer waits for its medium, and the next one begins beside it."""
_TIMES: Final = 10.0
_LONGEST: Final = 1.0


def stores_at_once(suggested_depth: int) -> int:
    """Stores in flight in a tier whose capabilities suggest so many."""
    return max(1, min(suggested_depth, AT_ONCE))


class GivingWay:
    """When the next store of a tier may begin while loads of it are under way.

    A request waits for loads, nobody for stores, and most media do both with the same chips or
    under the same cap. So from one store's beginning to the next pass ten times what the last one
    took, at most a second: stores get a tenth of such a time, and never starve.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._next = -inf

    def began(self, now: float) -> None:
        """A store did, whether loads were under way or not."""
        self._next = now + min(_TIMES * self._seconds, _LONGEST)

    def took(self, seconds: float) -> None:
        """A store has ended."""
        self._seconds = seconds

    def wait(self, now: float) -> float:
        """Seconds until the next one may begin; 0: now."""
        return max(0.0, self._next - now)

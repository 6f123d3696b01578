"""How long to wait between two looks at transfers that are under way: pure arithmetic.

NIXL tells nobody that a transfer has ended; somebody has to look. Looking too seldom costs
throughput (on some transports data only moves when somebody looks), looking too often a core. So
waits grow with the time in which nothing has ended: short while things move, long for what hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Pace"]

_SHORTEST: Final = 20e-6
_LONGEST: Final = 0.02
_SHARE: Final = 1 / 16
"""A wait adds at most this share to the time that the next end takes."""
_SERVING: Final = 0.001
"""Between two looks for peers while they move data: seen to be enough for the full speed."""


@dataclass(slots=True)
class Pace:
    """Tell it when something was begun or has ended; ask it how long to wait."""

    last: float = 0.0
    """When something began or ended last (seconds on the caller's clock)."""

    def moved(self, now: float) -> None:
        """Something began or ended."""
        self.last = now

    def wait(self, now: float, *, in_flight: bool, serving: float | None) -> float | None:
        """Seconds until the next look, at most ``serving``; None: none is needed until something is
        begun."""
        if not in_flight:
            return serving
        wait = _grown(now - self.last, _SHORTEST, _LONGEST)
        return wait if serving is None else min(wait, serving)


@dataclass(slots=True)
class Service:
    """The same for those who are at our memory, whose transfers are not ours to know of.

    Tell it when one of them may be about to begin, and when a look has found something to do.
    """

    longest: float | None = None
    """Seconds between two looks when nothing was found for long; None: nobody is served."""
    last: float = 0.0
    """When something was found, or expected, last."""

    def wait(self, now: float) -> float | None:
        """Seconds until the next look; None: none is needed."""
        return None if self.longest is None else _grown(now - self.last, _SERVING, self.longest)


def _grown(quiet: float, shortest: float, longest: float) -> float:
    """The wait after so many seconds in which nothing happened."""
    return min(max(quiet * _SHARE, shortest), longest)

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
        wait = min(max((now - self.last) * _SHARE, _SHORTEST), _LONGEST)
        return wait if serving is None else min(wait, serving)

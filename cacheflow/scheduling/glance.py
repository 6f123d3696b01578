"""One look at a request: what a decision asks about more than once, found out when first asked.

Holds as long as nothing of the request, or of what is under way, changes: for one decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cacheflow.scheduling.closing import Closing, Plan

__all__ = ["Glance"]

_UNASKED: Final = -1.0


class Glance:
    """What is expected of ``request`` at ``now``."""

    __slots__ = ("_ending", "_left", "_planned", "_request", "now")

    def __init__(self, request: Closing, now: float) -> None:
        self.now = now
        self._request = request
        self._left: float | None = _UNASKED
        self._ending: Plan | None = None
        self._planned = False

    @property
    def left(self) -> float | None:
        """:meth:`Expectations.loads_left`: seconds, or None."""
        if self._left == _UNASKED:
            self._left = self._request.loads_left(self.now)
        return self._left

    @property
    def ending(self) -> Plan | None:
        """:meth:`Closing.ending`."""
        if not self._planned:
            self._planned = True
            self._ending = self._request.ending(self.now)
        return self._ending

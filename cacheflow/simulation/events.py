"""Virtual time: a heap of things to happen, and the clock that every scheduler reads.

Events of the same moment happen in the order in which they were asked for, so a run depends on
nothing but its inputs. Knows nothing of what happens.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EventLoop"]


class EventLoop:
    """A :class:`~cacheflow.clock.Clock` that jumps from event to event.

    An event is a tuple ``(when, order, action, argument)``: no closure and no object an event.
    """

    __slots__ = ("_heap", "_order", "time")

    def __init__(self) -> None:
        self.time = 0.0
        """Seconds since the start of the run."""
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def at(self, when: float, action: Callable[[Any], object], argument: Any = None) -> None:
        """Call ``action(argument)`` at ``when`` (at once if that is past)."""
        heappush(self._heap, (when, next(self._order), action, argument))

    def step(self, limit: float = inf) -> bool:
        """Let the next event happen; False if there is none up to ``limit``."""
        heap = self._heap
        if not heap or heap[0][0] > limit:
            return False
        when, _, action, argument = heappop(heap)
        if when > self.time:
            self.time = when
        action(argument)
        return True

    def run(self, limit: float = inf) -> None:
        """Until nothing is left to happen up to ``limit``."""
        heap = self._heap
        while heap and heap[0][0] <= limit:
            when, _, action, argument = heappop(heap)
            if when > self.time:
                self.time = when
            action(argument)

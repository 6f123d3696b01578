"""Making room in the engine's KV memory: idle sessions are forgotten, the least wanted first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from cacheflow.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from cacheflow.session.session import Session

__all__ = ["Room"]

T = TypeVar("T")


class Room:
    """``resident``: the sessions that hold KV memory, kept up to date by its owner."""

    def __init__(self, resident: Collection[Session]) -> None:
        self._resident = resident
        self.made = 0
        """Sessions that were forgotten to make room."""

    async def to(self, work: Callable[[], Awaitable[T]], asking: Session) -> T:
        """The result of ``work``, tried again as long as idle sessions other than ``asking`` can be
        forgotten to make room for it. Their KV is copied for the tiers first, what there is room
        for.

        Raises:
            CapacityError: there is no room, and all that are left are busy.
        """
        while True:
            try:
                return await work()
            except CapacityError:
                idle = [s for s in self._resident if s is not asking and s.is_idle]
                if not idle:
                    raise
                await min(idle, key=lambda session: session.wanted).make_way()
                self.made += 1

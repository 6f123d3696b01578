"""Room in the engine's KV memory: idle sessions are forgotten for it, busy ones waited for.

Nobody waits while holding any: who has to wait gives up what it has first, so that those that do
hold memory come to their end.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.tasks import Pulse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator

    from cacheflow.session.session import Session

__all__ = ["Room"]

T = TypeVar("T")


class Room:
    """Of one engine. ``resident``: the sessions that hold KV memory there, or wait for some, of all
    flows over it; kept by its owner."""

    def __init__(self, resident: Collection[Session]) -> None:
        self._resident = resident
        self.made = 0
        """Sessions that were forgotten to make room."""
        self.waited = 0
        """Turns that had to wait for busy sessions."""
        self._line: list[Session] = []
        """Who waits for room; the first is let in next."""
        self._leaving = 0
        """Sessions that are giving memory back."""
        self._pulse = Pulse()
        self._changes = 0
        """How often anybody gave up memory, or took some."""

    def changed(self) -> None:
        """A session became idle, or holds less memory than before; or its flow is closing."""
        self._changes += 1
        self._pulse.beat()

    @contextmanager
    def giving_back(self) -> Iterator[None]:
        """Memory comes free by the end of this."""
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1
            self.changed()

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits, or is just being let in."""
        return bool(self._line)

    def is_contended(self, asking: Session) -> bool:
        """Whether ``asking`` would find room if it gave up what it has and waited."""
        return self.is_crowded or self._is_held(asking)

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

    async def wait_for(self, work: Callable[[], Awaitable[T]], asking: Session) -> T:
        """The same for one that holds nothing: until others have ended, in the order of arrival.

        Raises:
            CapacityError: there is no room although nobody else holds any.
            ClosedError: CacheFlow is closing.
        """
        self._line.append(asking)
        try:
            await self._first(asking)
            waits = False
            while True:
                before = self._changes
                try:
                    return await self.to(work, asking)
                except CapacityError:
                    _check_open(asking)
                    if not self._is_held(asking):
                        if self._changes == before:
                            raise
                        continue  # they had it when the engine was asked
                self.waited += not waits
                waits = True
                await self._pulse.next()
        finally:
            self._line.remove(asking)
            self._pulse.beat()

    async def _first(self, asking: Session) -> None:
        """Until ``asking`` is the first in the line. One whose flow is left does not wait for those
        of another flow."""
        while self._line[0] is not asking:
            _check_open(asking)
            await self._pulse.next()

    def _is_held(self, asking: Session) -> bool:
        """Whether anybody else holds memory; who waits for some holds none."""
        others = (s is not asking and s not in self._line for s in self._resident)
        return self._leaving > 0 or any(others)


def _check_open(asking: Session) -> None:
    """Raise ClosedError if its flow has been left."""
    if asking.is_over:
        raise ClosedError("CacheFlow was closed: no KV memory came free")

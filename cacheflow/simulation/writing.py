"""Stores behind the requests, over a modelled link: what writing costs those who load.

As real savers do it (:mod:`cacheflow.restore.writer`, :mod:`cacheflow.restore.pace`): a bounded
queue, one store after the other, the next beside the last once that has taken a moment, a few at
once, and seldom while loads of the same tier are under way (:class:`GivingWay`, the very one). On a
link that carries one direction at a time loads queue behind the stores that came before.

Copying out of the GPU and sealing take no time here, and nobody rests while tokens are decoded, as
on machines with four cores and more. What waits can be loaded over the link already; a real server
has it in memory. Knows numbers of chunks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.simulation.links import Wire
from cacheflow.tiers.write_behind import AT_ONCE, MAX_QUEUED, MOMENT, GivingWay

if TYPE_CHECKING:
    from cacheflow.simulation.events import EventLoop
    from cacheflow.simulation.links import Link

__all__ = ["OBJECT_TOKENS", "WriteBehind"]

OBJECT_TOKENS: Final = 256
"""Of a stored object, whatever blocks a trace names: the default of the settings."""


class WriteBehind:
    """One node's stores over one link. ``block_bytes``: of a block of ``block_tokens``."""

    def __init__(self, loop: EventLoop, link: Link, block_bytes: int, block_tokens: int) -> None:
        self.written_bytes = 0
        self.dropped_bytes = 0
        """Of blocks that found the queue full."""
        self._block_bytes = block_bytes
        self._pieces = max(1, block_tokens // OBJECT_TOKENS)
        self._loop = loop
        self._link = link
        self._waiting = 0
        self._flying = 0
        self._begun = 0
        self._is_taken = False
        """The last store that began has neither ended nor taken its moment."""
        self._loads = 0
        self._giving_way = GivingWay()
        self._is_armed = False

    def store(self, blocks: int) -> int:
        """Queue so many blocks; returns how many there was room for."""
        room = (MAX_QUEUED - self._waiting - self._flying) // self._pieces
        queued = min(blocks, room)
        self.dropped_bytes += (blocks - queued) * self._block_bytes
        self._waiting += queued * self._pieces
        self._next()
        return queued

    def load_began(self) -> None:
        """A load of the same tier is under way."""
        self._loads += 1

    def load_ended(self) -> None:
        """It is not any more."""
        self._loads -= 1
        if not self._loads:
            self._next()

    def _next(self) -> None:
        if self._is_taken or not self._waiting or self._flying == AT_ONCE:
            return
        if self._loads and (wait := self._giving_way.wait(self._loop.time)):
            self._arm(wait)
            return
        self._giving_way.began(self._loop.time)
        self._waiting -= 1
        self._flying += 1
        self._begun += 1
        self._is_taken = True
        self._loop.at(self._loop.time + MOMENT, self._turn_over, self._begun)
        nbytes = self._block_bytes // self._pieces
        self._link.send(_Store(nbytes, self._begun, self._loop.time), self._ended)

    def _arm(self, wait: float) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._loop.at(self._loop.time + wait, self._rested)

    def _rested(self, _: object) -> None:
        self._is_armed = False
        self._next()

    def _turn_over(self, number: int) -> None:
        if number == self._begun:
            self._is_taken = False
            self._next()

    def _ended(self, store: _Store) -> None:
        self._flying -= 1
        self._giving_way.took(self._loop.time - store.began)
        self.written_bytes += store.nbytes
        if store.number == self._begun:
            self._is_taken = False
        self._next()


class _Store(Wire):
    """``number``: of this writer's stores, from 1 on. ``began``: when it was given to the link."""

    __slots__ = ("began", "number")

    def __init__(self, nbytes: int, number: int, began: float) -> None:
        super().__init__(nbytes)
        self.number = number
        self.began = began

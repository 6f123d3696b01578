"""Saves of one key take turns, and each learns what the others stored since it looked.

Without that a save could look a key up, wait, and then replace a better copy that another one has
stored meanwhile. Knows this process only: what others write to a shared tier is not seen.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cacheflow.restore.tasks import on_loop_when_idle
from cacheflow.tiers.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.memory import InFlight
    from cacheflow.types import ChunkKey

__all__ = ["Turn", "Turns"]


class Turn:
    """One key of one tier while saves are concerned with it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.watchers = 0
        """Saves that have looked, or will, chunks that wait for their turn, and I/O that has not
        ended."""
        self._lock = asyncio.Lock()
        self._best = Rank.NONE
        """The best copy that may have been stored meanwhile."""

    async def begin(self) -> None:
        """Wait until nobody else is storing this key."""
        await self._lock.acquire()

    def end(self) -> None:
        """Let the next one begin."""
        self._lock.release()

    def is_kept(self, rank: Rank) -> bool:
        """Whether what was stored meanwhile is at least as good."""
        return self._best >= rank

    def stored(self, rank: Rank) -> None:
        """A copy of this kind is in the tier, or may be: how its store ended is not known."""
        self._best = max(self._best, rank)


class Turns:
    """The turns of all keys that are being saved."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, ChunkKey], Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def watch(self, tier: str, keys: Sequence[ChunkKey]) -> Iterator[None]:
        """From before one save looks ``keys`` up until it has joined those it wants to store."""
        for key in keys:
            self.join(tier, key)
        try:
            yield
        finally:
            for key in keys:
                self.leave(tier, key)

    def join(self, tier: str, key: ChunkKey) -> Turn:
        """What is stored under ``key`` is remembered from now on, until :meth:`leave`."""
        turn = self._turns.setdefault((tier, key), Turn())
        turn.watchers += 1
        return turn

    def leave(self, tier: str, key: ChunkKey) -> None:
        """The other side of :meth:`join`."""
        turn = self._turns[tier, key]
        turn.watchers -= 1
        if not turn.watchers:
            del self._turns[tier, key]

    def end(self, tier: str, key: ChunkKey, hold: InFlight | None) -> None:
        """End the turn, once ``hold`` is idle: a store that was given up may still land."""
        turn = self._turns[tier, key]
        if hold is None or not hold.in_flight:
            turn.end()
            return
        self.join(tier, key)

        def ended() -> None:
            turn.end()
            self.leave(tier, key)

        on_loop_when_idle(hold, ended)

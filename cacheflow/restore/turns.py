"""Saves of one key take turns, and each learns what the others stored since it looked.

Without that a save could look a key up, wait, and then replace a better copy that another one has
stored meanwhile. Knows this process only: what others write to a shared tier is not seen.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.memory import InFlight
    from cacheflow.types import ChunkKey

__all__ = ["Turn", "Turns"]


class Turn:
    """One key of one tier while saves are concerned with it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.watchers = 0
        """Saves that have looked, or will, and I/O that has not ended."""
        self._lock = asyncio.Lock()
        self._best = 0
        """The best copy that may have been stored meanwhile: 0 none, 1 any, 2 a canonical one."""

    async def begin(self) -> None:
        """Wait until nobody else is storing this key."""
        await self._lock.acquire()

    def end(self) -> None:
        """Let the next one begin."""
        self._lock.release()

    def is_kept(self, canonical: bool) -> bool:
        """Whether what was stored meanwhile is at least as good as a copy of this kind."""
        return self._best >= 1 + canonical

    def stored(self, canonical: bool) -> None:
        """A copy of this kind is in the tier, or may be: how its store ended is not known."""
        self._best = max(self._best, 1 + canonical)


class Turns:
    """The turns of all keys that are being saved."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, ChunkKey], Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def watch(self, tier: str, keys: Sequence[ChunkKey]) -> Iterator[list[Turn]]:
        """From before one save looks ``keys`` up until it has stored the last of them."""
        turns = [self._join(tier, key) for key in keys]
        try:
            yield turns
        finally:
            for key in keys:
                self._leave(tier, key)

    def end(self, tier: str, key: ChunkKey, hold: InFlight | None) -> None:
        """End the turn, once ``hold`` is idle: a store that was given up may still land."""
        if hold is None or not hold.in_flight:
            self._turns[tier, key].end()
            return
        loop, turn = asyncio.get_running_loop(), self._join(tier, key)

        def on_loop() -> None:
            turn.end()
            self._leave(tier, key)

        def ended() -> None:  # on any thread, and perhaps after the loop is gone
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(on_loop)

        hold.when_idle(ended)

    def _join(self, tier: str, key: ChunkKey) -> Turn:
        turn = self._turns.setdefault((tier, key), Turn())
        turn.watchers += 1
        return turn

    def _leave(self, tier: str, key: ChunkKey) -> None:
        turn = self._turns[tier, key]
        turn.watchers -= 1
        if not turn.watchers:
            del self._turns[tier, key]

"""So many operations and so many bytes at once; who waits is served in the order of arrival.

Belongs to one event loop. Knows nothing of what the operations are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

__all__ = ["Budget"]

T = TypeVar("T")


class Budget:
    """``operations`` and ``nbytes`` under way at once.

    Something larger than the budget goes through alone.
    """

    def __init__(self, operations: int, nbytes: int) -> None:
        self._most = (operations, nbytes)
        self._operations = self._bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int]] = deque()

    @property
    def under_way(self) -> tuple[int, int]:
        """Operations and bytes."""
        return self._operations, self._bytes

    @property
    def waiting(self) -> int:
        """Batches that wait for their turn."""
        return len(self._waiting)

    def pieces(self, items: Sequence[T], size: Callable[[T], int]) -> Iterator[Sequence[T]]:
        """``items`` in order, in runs that fit the budget: one run, as a rule."""
        first = total = 0
        for index, item in enumerate(items):
            nbytes = size(item)
            if index > first and not self._fits(index - first, 1, total, nbytes):
                yield items[first:index]
                first, total = index, 0
            total += nbytes
        if first < len(items):
            yield items[first:]

    @asynccontextmanager
    async def taken(self, operations: int, nbytes: int) -> AsyncIterator[None]:
        """Wait for the budget, and have it inside the ``async with``."""
        await self._take(operations, nbytes)
        try:
            yield
        finally:
            self._give(operations, nbytes)

    async def _take(self, operations: int, nbytes: int) -> None:
        if not self._waiting and self._is_free(operations, nbytes):
            self._operations += operations
            self._bytes += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (turn, operations, nbytes)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(operations, nbytes)  # its turn came in the same moment
            else:
                if place in self._waiting:  # not if another one that left has been here
                    self._waiting.remove(place)
                self._serve()
            raise

    def _give(self, operations: int, nbytes: int) -> None:
        self._operations -= operations
        self._bytes -= nbytes
        self._serve()

    def _serve(self) -> None:
        """Let those in front go whose share is free; nobody overtakes."""
        while self._waiting:
            turn, operations, nbytes = self._waiting[0]
            if not turn.done():
                if not self._is_free(operations, nbytes):
                    return
                self._operations += operations
                self._bytes += nbytes
                turn.set_result(None)
            self._waiting.popleft()

    def _is_free(self, operations: int, nbytes: int) -> bool:
        idle = not self._operations
        return idle or self._fits(self._operations, operations, self._bytes, nbytes)

    def _fits(self, operations: int, more: int, nbytes: int, more_bytes: int) -> bool:
        return operations + more <= self._most[0] and nbytes + more_bytes <= self._most[1]

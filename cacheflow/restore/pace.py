"""One thing at a time: what is saved behind the requests leaves them the machine's other cores.

Copying a chunk out of the engine, sealing it and storing it in each tier takes a core for a few
milliseconds; all at once they take several tokens' worth of every core there is. What takes longer
than a moment waits for its medium rather than computes, and holds nobody up. Knows no chunks.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["Pace"]

_MOMENT: Final = 0.01


class Pace:
    """Turns in the order of asking; the next one begins when the last one has ended, or has taken
    ``moment`` seconds. Belongs to one event loop."""

    def __init__(self, moment: float = _MOMENT) -> None:
        self._moment = moment
        self._free = asyncio.Semaphore()
        self._hurries = 0

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits for all of it: inside, no new turn is waited for."""
        self._hurries += 1
        try:
            yield
        finally:
            self._hurries -= 1

    @asynccontextmanager
    async def turn(self, *, hurry: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it inside; whoever is in a hurry neither waits nor is waited
        for."""
        if hurry or self._hurries:
            yield
            return
        await self._free.acquire()
        is_over = False

        def over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._moment, over)
        try:
            yield
        finally:
            timer.cancel()
            over()

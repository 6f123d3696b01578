"""One thing at a time, with rests: what is saved behind the requests yields to those who decode.

Copying a chunk out of the engine, sealing it and storing it in each tier takes a core, the
interpreter's lock and the caches for a few milliseconds; all at once they take several tokens'
worth of each. While tokens are being decoded a rest follows each piece of work, so that the work is
spread over many tokens instead of holding up a few. What takes longer than a moment waits for its
medium rather than computes, and holds nobody up. Knows no chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from cacheflow.cores import usable_cores
from cacheflow.tiers.write_behind import MOMENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["Pace"]

_SHARE: Final = 0.1
"""Of the time that passes while tokens are decoded, what work takes where it has no core of its
own: a turn of 2 ms, then 18 ms of rest, which is about one turn a token."""
_CORES: Final = 4
"""From as many on, it has: then nobody rests."""


class Pace:
    """Turns in the order of asking; the next one begins when the last one has ended, or has taken
    ``moment`` seconds, and has been rested from. ``is_decoding``: whether a rest is needed; asked
    when a turn begins and when it is over. ``share``: of the time (None: by the machine's cores).
    Belongs to one event loop."""

    def __init__(
        self,
        is_decoding: Callable[[], bool] = lambda: False,
        *,
        moment: float = MOMENT,
        share: float | None = None,
    ) -> None:
        self._is_decoding = is_decoding
        self._moment = moment
        if share is None:
            share = _SHARE if usable_cores() < _CORES else 1.0
        self._rest_of = (1.0 - share) / share
        """Seconds of rest for a second of work."""
        self._waiting: deque[asyncio.Future[bool]] = deque()
        """Each is told whether the turn is its own to end, or nobody's."""
        self._is_taken = False
        self._rest: asyncio.TimerHandle | None = None
        self._hurries = 0

    @property
    def is_hurried(self) -> bool:
        """Whether somebody waits for it."""
        return self._hurries > 0

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits for it: from now on, and inside, no turn is waited for."""
        self._hurries += 1
        while self._let_in(own=False):
            pass
        if self._rest is not None:
            self._rest.cancel()
            self._next()
        try:
            yield
        finally:
            self._hurries -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it inside; in a hurry it neither waits nor is waited for."""
        if self._hurries or not await self._asked():
            yield
            return
        begun, was_decoding = time.monotonic(), self._is_decoding()
        is_over = False

        def over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                needs_rest = was_decoding or self._is_decoding()
                self._rested(time.monotonic() - begun if needs_rest else 0.0)

        timer = asyncio.get_running_loop().call_later(self._moment, over)
        try:
            yield
        finally:
            timer.cancel()
            over()

    async def _asked(self) -> bool:
        """Wait until it is our turn; False: somebody is in a hurry, and it is nobody's."""
        if not self._is_taken:
            self._is_taken = True
            return True
        mine: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not mine.cancelled() and mine.result():
                self._next()
            raise

    def _rested(self, seconds: float) -> None:
        """The next turn, after the rest from ``seconds`` of work."""
        rest = min(seconds, self._moment) * self._rest_of
        if not rest or self._hurries:
            self._next()
            return
        self._rest = asyncio.get_running_loop().call_later(rest, self._next)

    def _next(self) -> None:
        self._rest = None
        self._is_taken = self._let_in(own=True)

    def _let_in(self, *, own: bool) -> bool:
        """The first that still waits; False: nobody does."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # cancelled, and not told yet
                first.set_result(own)
                return True
        return False

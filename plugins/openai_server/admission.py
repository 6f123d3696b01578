"""How many requests are in the engine, how many wait, and who is sent away."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from cacheflow.plugins.openai_server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Admission"]

_FIRST_GUESS: Final = 1.0
"""Seconds a request is believed to take before any has."""
_LONGEST_ADVICE: Final = 60


class Admission:
    """A turnstile. Used from one event loop.

    ``rejected`` is told why whenever a request is sent away.
    """

    def __init__(
        self, running: int, waiting: int, patience: float, rejected: Callable[[str], None]
    ) -> None:
        self._places = asyncio.Semaphore(running)
        self._most_running, self._most_waiting = running, waiting
        self._patience = patience
        self._rejected = rejected
        self._seconds = _FIRST_GUESS
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.waiting = 0
        self.draining = False

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in the engine, once it is this request's turn.

        Raises:
            ApiError: 429 if too many wait or the wait was too long, 503 if the server drains.
        """
        if self.draining:
            raise self._refusal(503, "draining", "the server is shutting down")
        if self._places.locked() and self.waiting >= self._most_waiting:
            raise self._refusal(429, "rate_limit_exceeded", "too many requests are waiting")
        await self._wait()
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._seconds += 0.2 * (asyncio.get_running_loop().time() - began - self._seconds)
            self.running -= 1
            self._places.release()
            self._settle()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests; whether those that were taken ended within ``seconds``."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _wait(self) -> None:
        self._idle.clear()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
            self.running += 1
        except TimeoutError:
            raise self._refusal(429, "rate_limit_exceeded", "no turn came in time") from None
        finally:
            self.waiting -= 1
            self._settle()

    def _settle(self) -> None:
        if not self.running and not self.waiting:
            self._idle.set()

    def _refusal(self, status: int, code: str, message: str) -> ApiError:
        self._rejected("draining" if self.draining else "busy")
        ahead = (self.waiting + 1) * self._seconds / self._most_running
        advice = str(min(max(1, math.ceil(ahead)), _LONGEST_ADVICE))
        text = f"{message}; try again in {advice} s"
        return ApiError(status, text, code=code, headers={"Retry-After": advice})

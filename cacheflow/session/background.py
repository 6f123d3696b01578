"""What a flow does beside its sessions' turns: closing those whose time is over, late advice.

Everything is a task with an owner, and ends with the flow.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from cacheflow.tasks import Lasting

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AbstractAsyncContextManager

    from cacheflow.clock import Clock
    from cacheflow.session.session import Session

__all__ = ["Background"]

_log = logging.getLogger(__name__)


class Background:
    """Runs while :meth:`running` lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._mortal: set[Session] = set()
        """Sessions with a time to live: kept known until it is over."""
        self._wake = asyncio.Event()
        self._closed = False

    def running(self) -> AbstractAsyncContextManager[None]:
        """What is not done when it ends is given up."""
        return Lasting(self._begin, self._end)

    async def _begin(self) -> None:
        self.spawn(self._bury())

    async def _end(self) -> None:
        self._closed = True
        self._mortal.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` behind whoever asks; its failure is logged."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def watch(self, session: Session) -> None:
        """The session was used: it lives on for its time."""
        if session.ttl is not None and not self._closed:
            self._mortal.add(session)
            self._wake.set()

    def forget(self, session: Session) -> None:
        """The session is closed."""
        self._mortal.discard(session)

    async def _bury(self) -> None:
        while True:
            self._wake.clear()
            due = min((s.used_at + (s.ttl or 0.0) for s in self._mortal), default=None)
            try:
                wait = None if due is None else max(due - self._clock.now(), 0.0)
                async with asyncio.timeout(wait):
                    await self._wake.wait()
                continue
            except TimeoutError:
                now = self._clock.now()
            for session in [s for s in self._mortal if s.used_at + (s.ttl or 0.0) <= now]:
                if session.is_idle:
                    self._mortal.discard(session)
                    await session.close()
                else:
                    session.used_at = now  # its turn is its use

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("behind the sessions: %s", error, exc_info=error)

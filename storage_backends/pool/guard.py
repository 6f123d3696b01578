"""Holds of one transfer: what it touches is let go of when it can be touched no more.

A transfer may go on when nobody waits for it (a deadline passed, a caller left). So each has a hold
of its own, which the transport takes and releases, and what is to be done once that is idle:
letting go of the caller's buffer, giving a lease or a slot back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from cacheflow.memory import InFlight
from cacheflow.types import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Guard"]


class Guard(InFlight):
    """Over ``buffers`` of a caller, from now until :meth:`leave` and the last transfer's end: the
    hold under which a transport touches that memory."""

    __slots__ = ("_is_left", "_loop", "buffers")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._is_left = False
        for buffer in buffers:
            buffer.hold.acquire()
        self.buffers = [
            Buffer(buffer.address, buffer.nbytes, buffer.kind, buffer.view, self)
            for buffer in buffers
        ]
        """The same memory, for a transport: under this hold."""
        self.acquire()
        self.when_idle(partial(_release, buffers))

    @property
    def in_use(self) -> bool:
        """Whether a transfer may still touch it."""
        return self.in_flight > (not self._is_left)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop once nothing can be touched any more."""
        self.when_idle(partial(self._on_loop, callback))

    def leave(self) -> None:
        """Nothing new begins. Idempotent."""
        if not self._is_left:
            self._is_left = True
            self.release()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is gone, and so is the connection
            self._loop.call_soon_threadsafe(callback)


def _release(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.hold.release()

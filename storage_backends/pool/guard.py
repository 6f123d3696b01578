"""Holds of one transfer: what it touches is let go of when it can be touched no more.

A transfer may go on when nobody waits for it (a deadline passed, a caller left). So each has a hold
of its own, which the transport takes and releases, and what is to be done once that is idle:
letting go of the caller's buffer, giving a lease or a slot back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from cacheflow.memory import InFlight
from cacheflow.types import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Guard"]


class Guard:
    """Over ``buffers`` of a caller, from now until :meth:`leave` and the last transfer's end."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.hold = InFlight()
        """For whoever else touches the memory."""
        self.hold.acquire()
        self._loop = asyncio.get_running_loop()
        self._is_left = False
        for buffer in buffers:
            buffer.hold.acquire()
        self.buffers = [
            Buffer(buffer.address, buffer.nbytes, buffer.kind, buffer.view, self.hold)
            for buffer in buffers
        ]
        """The same memory, for a transport: under this guard's hold."""
        self.hold.when_idle(lambda: _release(buffers))

    @property
    def in_use(self) -> bool:
        """Whether a transfer may still touch it."""
        return self.hold.in_flight > (not self._is_left)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop once nothing can be touched any more."""

        def from_any_thread() -> None:
            with suppress(RuntimeError):  # the loop is gone, and so is the connection
                self._loop.call_soon_threadsafe(callback)

        self.hold.when_idle(from_any_thread)

    def leave(self) -> None:
        """Nothing new begins. Idempotent."""
        if not self._is_left:
            self._is_left = True
            self.hold.release()


def _release(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.hold.release()

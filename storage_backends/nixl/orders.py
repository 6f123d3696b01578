"""What the reactor's thread is to do: put in from anywhere, taken out by the thread, which sleeps
meanwhile for as long as it likes.

Not a ``queue.SimpleQueue``: when CPython's wakes and finds nothing (in 3.11, after a put that raced
the end of the wait before), it works out what is left of its time, and if that is less than nothing
it waits for ever. With waits of tens of microseconds this did happen: the thread slept with a
transfer under way, and the load ended at its deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, Generic, TypeVar

__all__ = ["Orders"]

T = TypeVar("T")


class Orders(Generic[T]):
    """First in, first out; one thread takes."""

    def __init__(self) -> None:
        self._orders: deque[T] = deque()
        self._bell: Final = threading.Lock()
        """Held while there is nothing new. Its waits keep their deadlines."""
        self._bell.acquire()

    def put(self, order: T) -> None:
        """From any thread; never waits."""
        self._orders.append(order)
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

    def take(self, seconds: float | None) -> list[T]:
        """What there is now; waits for it at most so long (None: as long as it takes).

        Empty if nothing came, and now and then at once: a ring may tell of what is taken already.
        """
        if not self._orders:
            self._bell.acquire(timeout=-1 if seconds is None else seconds)
        return [self._orders.popleft() for _ in range(len(self._orders))]

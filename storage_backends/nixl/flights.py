"""One transfer on its way: what it moves, whose memory it holds, and how its end is told.

From the loop to the reactor's thread and back. Exactly one of three things happens to a flight: it
is withdrawn before it began; it is refused when it begins; it ends. In each of them it lets go of
the memory, which it has held since it was made.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.storage_backends.nixl.agent import Range, Way
    from cacheflow.types import Hold

__all__ = ["Flight"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """``ours[i]`` is read from, or written to, ``theirs[i]`` in the memory of ``peer``."""

    way: Way
    peer: str
    ours: Sequence[Range]
    theirs: Sequence[Range]
    holds: Sequence[Hold]
    told: Callable[[BaseException | None], None]
    """Called on the loop with how it ended; not called for a flight that was withdrawn."""
    kind: MemoryKind = MemoryKind.PAGEABLE
    before: Callable[[], None] | None = None
    """Called on the reactor's thread before it begins: a copy into the memory that is sent."""
    after: Callable[[], None] | None = None
    """Called there when it has ended well: a copy out of the memory that was received."""
    handle: object = None
    """NIXL's own, of the reactor's thread."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_taken: bool = False

    def __post_init__(self) -> None:
        for hold in self.holds:
            hold.acquire()

    def take(self) -> bool:
        """Begin it, or withdraw it: only the first to ask may. From any thread."""
        with self._lock:
            taken, self._is_taken = self._is_taken, True
            return not taken

    def touches(self, memory: Range) -> bool:
        """Whether any of ``memory`` is what it reads or writes here."""
        start, stop = memory[0], memory[0] + memory[1]
        return any(at < stop and start < at + nbytes for at, nbytes in self.ours)

    def let_go(self) -> None:
        """Nobody touches the memory any more. Called once."""
        for hold in self.holds:
            try:
                hold.release()
            except Exception as error:  # of an owner's callback: others' transfers go on
                _log.warning("releasing memory: %r", error)

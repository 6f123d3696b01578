"""One restore of the worker: what is stored, what has arrived, and what compute has claimed.

The event loop brings blocks, the thread that runs the forward passes claims them: the two share
what is under one lock. A block is copied into vLLM's cache only while compute has not claimed it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.fetcher import Held
    from cacheflow.plugins.vllm.records import Found
    from cacheflow.types import ChunkInfo

__all__ = ["Restoring"]


@dataclass(slots=True, eq=False)
class Restoring:
    """Fields are the event loop's, except those under ``lock``."""

    id: int
    first: int
    keys: tuple[bytes, ...]
    since: float
    """When something last arrived for it."""
    stored: dict[int, tuple[str, ChunkInfo]] = field(default_factory=dict)
    """Block -> tier and object."""
    found: Found | None = None
    waiting: dict[str, list[int]] = field(default_factory=dict)
    """Tier -> blocks not asked for yet, the next one last."""
    stop: int = 0
    """Nothing below is loaded: not stored, failed, or compute's."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    lookup: asyncio.Task[None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    landed: dict[int, Held | None] = field(default_factory=dict)
    """Under the lock: verified blocks, with their bytes while they are not in place."""
    low: int = 0
    claim: int = 0
    """Under the lock: blocks below are compute's."""
    targets: tuple[int, tuple[int, ...]] | None = None
    closed: bool = False

    @property
    def is_over(self) -> bool:
        """It will not get any lower."""
        return self.low <= max(self.stop, self.claim)

    def land(self, block: int, held: Held) -> bool:
        """Keep a verified block, or let go of it if it is not wanted any more; whether there is
        anything to :meth:`place`."""
        with self.lock:
            if self.closed or block < self.claim:
                held.release()
                return False
            self.landed[block] = held
            return self.targets is not None

    def place(self, memory: BlockMemory, block: int) -> None:
        """Copy a landed block to its target, unless compute has it by now."""
        with self.lock:
            held, target = self.landed.get(block), self._target(block)
            if held is None:
                return
            if target is not None:
                memory.write(target, held.buffer)
                self.landed[block] = None
            else:
                del self.landed[block]  # it counts as there only if it is in place
            held.release()

    def take(self, block: int) -> None:
        """Blocks below ``block`` are compute's from now on: nothing is copied into them."""
        with self.lock:
            self.claim = max(self.claim, block)

    def aim(self, memory: BlockMemory, first: int, ids: tuple[int, ...]) -> None:
        """Say where blocks from ``first`` on go; what has landed is in place when this returns."""
        with self.lock:
            self.targets = (first, ids)
            landed = [block for block, held in self.landed.items() if held is not None]
        for block in landed:
            self.place(memory, block)
        self.settle()

    def settle(self) -> None:
        """Find anew how far down everything is there; a refused copy may have made a gap."""
        assert self.found is not None
        with self.lock:
            low = self.found.top
            while self._is_there(low - 1):
                low -= 1
            self.low = low

    def end(self) -> None:
        """Nothing is copied any more: a copy under way has ended when this returns, and no other
        begins. Gives back what has landed."""
        with self.lock:
            self.closed = True
            for held in self.landed.values():
                if held is not None:
                    held.release()
            self.landed.clear()

    def _is_there(self, block: int) -> bool:
        """Whether compute may count on it: in place, or before there is one, verified. A block that
        is still being copied is not there, though a later one may be."""
        return block in self.landed and (self.targets is None or self.landed[block] is None)

    def _target(self, block: int) -> int | None:
        """Block id to copy ``block`` to, if it is known and compute has not claimed it."""
        if self.targets is None or self.closed or block < self.claim:
            return None
        first, ids = self.targets
        return ids[block - first] if first <= block < first + len(ids) else None

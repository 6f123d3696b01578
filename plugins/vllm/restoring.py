"""One restore of the worker: what is stored, what has arrived, and what compute has claimed.

The event loop brings blocks, the thread that runs the forward passes claims them: the two share
what is under one lock. A block is copied into vLLM's cache only while compute has not claimed it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.plugins.vllm.records import Found

if TYPE_CHECKING:
    import asyncio

    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.fetcher import Held
    from cacheflow.plugins.vllm.pieces import Piece
    from cacheflow.plugins.vllm.sources import Source

__all__ = ["Restoring"]


@dataclass(slots=True, eq=False)
class Restoring:
    """Fields are the event loop's, except those under ``lock``."""

    id: int
    first: int
    keys: tuple[bytes, ...]
    since: float
    """When something last arrived for it."""
    layers: int
    """Of every block."""
    stored: dict[int, Source] = field(default_factory=dict)
    """Block -> where it is."""
    found: Found | None = None
    """What is stored, for all ranks once they have agreed (:meth:`cut`)."""
    waiting: dict[str, list[Piece]] = field(default_factory=dict)
    """Tier -> what was not asked for yet, the next one last."""
    stop: int = 0
    """Nothing below is loaded: not stored, failed, or compute's."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    whole: int = 0
    """Loads of whole blocks on their way."""
    lookup: asyncio.Task[None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    held: dict[int, list[tuple[Piece, Held]]] = field(default_factory=dict)
    """Under the lock: block -> what is verified and not in place."""
    landed: dict[int, int] = field(default_factory=dict)
    """Under the lock: block -> its verified layers, as bits."""
    placed: dict[int, int] = field(default_factory=dict)
    """Under the lock: those that are in place."""
    low: int = 0
    claim: int = 0
    """Under the lock: blocks below are compute's."""
    targets: tuple[int, tuple[int, ...]] | None = None
    closed: bool = False

    @property
    def is_over(self) -> bool:
        """It will not get any lower."""
        return self.low <= self.floor

    @property
    def floor(self) -> int:
        """The lowest block that is still to be loaded."""
        return max(self.stop, self.claim)

    def wants(self, block: int) -> bool:
        """Whether ``block`` is still to be loaded."""
        return self.found is not None and self.floor <= block < self.found.top

    def fail(self, block: int) -> None:
        """It will not come: nothing below is of use."""
        if self.wants(block):
            self.stop = block + 1

    def land(self, piece: Piece, held: Held) -> bool:
        """Keep what is verified, or let go of it if it is not wanted any more; whether there is
        anything to :meth:`place`."""
        with self.lock:
            assert self.found is not None
            if self.closed or not self.claim <= piece.block < self.found.top:
                held.release()
                return False
            self.held.setdefault(piece.block, []).append((piece, held))
            self.landed[piece.block] = self.landed.get(piece.block, 0) | piece.mask
            return self.targets is not None

    def place(self, memory: BlockMemory, block: int) -> None:
        """Copy what has landed of a block to its target, unless compute has it by now."""
        with self.lock:
            target = self._target(block)
            for piece, held in self.held.pop(block, ()):
                if target is not None:
                    memory.write(target, held.buffer, piece.layers)
                    self.placed[block] = self.placed.get(block, 0) | piece.mask
                else:
                    self.landed.pop(block, None)  # it counts as there only if it is in place
                held.release()

    def take(self, block: int) -> None:
        """Blocks below ``block`` are compute's from now on: nothing is copied into them."""
        with self.lock:
            self.claim = max(self.claim, block)

    def aim(self, memory: BlockMemory, first: int, ids: tuple[int, ...]) -> None:
        """Say where blocks from ``first`` on go; what has landed is in place when this returns."""
        with self.lock:
            self.targets = (first, ids)
            landed = list(self.held)
        for block in landed:
            self.place(memory, block)
        self.settle()

    def cut(self, top: int) -> None:
        """Blocks from ``top`` on are not wanted: another rank has not got them."""
        assert self.found is not None
        with self.lock:
            self.found = Found(min(self.found.bottom, top), min(self.found.top, top))
            for block in [block for block in self.landed if block >= top]:
                del self.landed[block]
                for _, held in self.held.pop(block, ()):
                    held.release()
        self.settle()

    def settle(self) -> None:
        """Find anew how far down everything is there; a refused copy may have made a gap."""
        assert self.found is not None
        whole = (1 << self.layers) - 1
        with self.lock:
            there, low = self._there(), self.found.top
            while there.get(low - 1) == whole:
                low -= 1
            self.low = low

    def partial(self) -> tuple[float, bool]:
        """What has landed of blocks that are not complete, in blocks; and whether that includes the
        first layer of each of them."""
        with self.lock:
            parts = [self.landed.get(block, 0) for block in range(self.floor, self.low)]
        row = bool(parts) and all(part & 1 for part in parts)
        return sum(part.bit_count() for part in parts) / self.layers, row

    def has(self, layer: int, first: int) -> bool:
        """Whether ``layer`` of every block from ``first`` to the top is in place."""
        bit = 1 << layer
        with self.lock:
            return all(self.placed.get(block, 0) & bit for block in range(first, self.low))

    def end(self) -> None:
        """Nothing is copied any more: a copy under way has ended when this returns, and no other
        begins. Gives back what has landed."""
        with self.lock:
            self.closed = True
            for held in self.held.values():
                for _, each in held:
                    each.release()
            self.held.clear()
            self.landed.clear()

    def _there(self) -> dict[int, int]:
        """The layers that compute may count on: those in place, or before there is one, verified.
        What is still being copied is not there, though a later block may be."""
        return self.landed if self.targets is None else self.placed

    def _target(self, block: int) -> int | None:
        """Block id to copy ``block`` to, if it is known and compute has not claimed it."""
        if self.targets is None or self.closed or block < self.claim:
            return None
        first, ids = self.targets
        return ids[block - first] if first <= block < first + len(ids) else None

"""The restores of one scheduler: what is known of each, and what the worker is told of them.

Keeps the blocks that loads write pinned until the worker has said that it writes no more. Decides
nothing. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

from cacheflow.plugins.vllm.planner import View
from cacheflow.plugins.vllm.records import Opened, Orders

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.plugins.vllm.keyring import Request
    from cacheflow.plugins.vllm.pins import Pins
    from cacheflow.plugins.vllm.records import Found, Progress

__all__ = ["Limits", "Phase", "Restore", "Restores"]


class Phase(Enum):
    """Where a restore is."""

    OUTSIDE = auto()
    """The request has no blocks yet: looking up, or loading into staging memory."""
    RACING = auto()
    """It runs: compute from the front, loads from the back."""
    PLACED = auto()
    """It entered with its prefix complete."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What vLLM's configuration says."""

    block: int
    """Tokens of a block."""
    budget: int
    """Tokens a step may compute."""
    staged_blocks: int
    """Blocks that a worker's staging memory holds for loads."""
    layers: int
    """Of the model."""
    ranks: int
    """Workers, each with some of the heads."""
    shares: bool
    """Local prefix caching is on."""


@dataclass(slots=True, eq=False)
class Restore:
    """One request's restore."""

    id: int
    request: Request
    keys: tuple[bytes, ...]
    """Of the blocks from ``first`` on."""
    first: int
    policy: str
    opened: float
    edge: int = 0
    """Blocks before this one were in the local prefix cache when it entered, or computed when it
    went on under its last loads."""
    base: int = 0
    """Tokens that were there when it entered."""
    asked: int = 0
    phase: Phase = Phase.OUTSIDE
    found: Found | None = None
    progress: Progress | None = None
    blocks: int = 0
    """Blocks compute may take in this step; WHOLE: as many as it likes."""
    meets: bool = False
    """The step that is scheduled is planned to end where the loads will be."""
    overlaps: bool = False
    """It runs behind its prefix, whose last blocks (from ``edge`` on) are still being loaded."""

    def low(self, computed: int, block: int) -> int:
        """The first block that loads bring, with ``computed`` tokens done or given to a step. In a
        race a block that compute has begun is compute's, whatever the last report says: where
        steps are scheduled ahead it may be older than the claim that had the load refused."""
        assert self.progress is not None
        races = self.phase is Phase.RACING and not self.overlaps
        return max(self.progress.low, -(-computed // block) if races else 0)

    def view(self, computed: int, limits: Limits, hidden: float = 0.0) -> View:
        """As the planner sees it, with ``computed`` tokens done; ``hidden``: see there."""
        found, progress = self.found, self.progress
        assert found is not None
        assert progress is not None
        return View(
            done=computed,
            tokens=self.request.num_tokens,
            block=limits.block,
            top=found.top,
            low=self.low(computed, limits.block),
            bottom=progress.low if progress.dead else found.bottom,
            block_seconds=progress.block_seconds,
            first_seconds=progress.first_seconds,
            waited=progress.waited,
            budget=limits.budget,
            part=progress.part,
            hidden=hidden,
            whole=progress.whole,
        )


class Restores:
    """Open restores, those that are ending, and the orders that go to the worker next."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._by_request: dict[str, Restore] = {}
        self._by_id: dict[int, Restore] = {}
        self._leaders: dict[bytes, int] = {}
        """Key of the first missing block -> the restore that brings it."""
        self._pinned: dict[int, tuple[int, ...]] = {}
        self._ending: dict[int, tuple[int, ...]] = {}
        """Restores the worker may still write for, with the block ids pinned for them."""
        self._numbers = count(1)
        self.orders = Orders()

    @property
    def pending(self) -> bool:
        """Whether the worker still has to be told, or to tell, something."""
        return bool(self._ending or self.orders)

    @property
    def busy(self) -> bool:
        """Whether the worker is at something that will be reported."""
        return bool(self._by_id or self._ending)

    def all(self) -> list[Restore]:
        """Those that are open, the oldest first."""
        return list(self._by_id.values())

    def of(self, request_id: str) -> Restore | None:
        return self._by_request.get(request_id)

    def get(self, restore_id: int) -> Restore | None:
        return self._by_id.get(restore_id)

    def leader(self, key: bytes) -> Restore | None:
        """The first of those that begin with this block."""
        return self._by_id.get(self._leaders.get(key, 0))

    def open(
        self, request: Request, first: int, keys: Sequence[bytes], policy: str, now: float
    ) -> None:
        """Have the worker look for blocks ``first`` and on; ``keys``: theirs, one at least."""
        restore = Restore(next(self._numbers), request, tuple(keys), first, policy, now)
        self._by_request[request.request_id] = self._by_id[restore.id] = restore
        self._leaders.setdefault(keys[0], restore.id)
        self.orders.opened.append(Opened(restore.id, first, restore.keys))

    def aim(self, restore: Restore, first: int, ids: Iterable[int]) -> None:
        """Have loads of blocks ``first`` and on go to ``ids``, which are pinned for it."""
        targets = tuple(ids)
        self._pins.pin(targets)
        self._pinned[restore.id] = targets
        self.orders.targets[restore.id] = (first, targets)

    def close(self, restore: Restore) -> None:
        """Tell the worker to stop; until it says so, the targets stay pinned."""
        del self._by_request[restore.request.request_id], self._by_id[restore.id]
        first = restore.keys[0]
        if self._leaders.get(first) == restore.id:
            del self._leaders[first]
        orders = self.orders
        for aims in (orders.tops, orders.targets, orders.claims, orders.tails):
            aims.pop(restore.id, None)
        pinned = self._pinned.pop(restore.id, ())
        unheard = [order for order in orders.opened if order.restore == restore.id]
        if unheard:  # the worker was never told of it
            orders.opened.remove(unheard[0])
            self._pins.unpin(pinned)
            return
        self._ending[restore.id] = pinned
        orders.closed.append(restore.id)

    def ended(self, restore_ids: Iterable[int]) -> None:
        """The worker writes nothing more for these."""
        for restore_id in restore_ids:
            self._pins.unpin(self._ending.pop(restore_id, ()))

    def abandon(self) -> None:
        """All storage is gone, and every restore closed: nobody writes, or says, any more."""
        self.ended(list(self._ending))
        self.orders = Orders()

    def take_orders(self) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

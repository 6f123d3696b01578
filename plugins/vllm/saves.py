"""Which blocks to store: those that a step completes, once each, within a share of the pool.

Belongs to the scheduler's thread. A block is pinned from the step that completes it until the
worker has copied it; what does not fit under the cap is tried again with the request's next step,
and given up with its end.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.plugins.vllm.records import SaveOrder, SaveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.plugins.vllm.pins import Pins
    from cacheflow.types import ChunkKey

__all__ = ["SaveBook"]

_REMEMBERED: Final = 1 << 16
"""Keys of blocks that are known to be stored."""


class SaveBook:
    """``share``: of the pool's blocks that may be held for saving at a time."""

    def __init__(self, block: int, share: float = 0.25) -> None:
        self._block = block
        self._share = share
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._open: dict[int, tuple[bytes, int]] = {}
        """Save -> key and block id."""
        self._numbers = count(1)
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Saves whose block is still pinned."""
        return len(self._open)

    def plan(
        self,
        first: int,
        keys: Sequence[ChunkKey],
        ids: Sequence[int],
        pins: Pins,
        *,
        width: int,
        tenant: bytes,
    ) -> tuple[int, list[SaveOrder]]:
        """Orders for those of the complete blocks from number ``first`` on (``keys`` and block
        ``ids``) that are not stored; also the number of the first one there was no room for."""
        orders: list[SaveOrder] = []
        room = max(int(pins.size * self._share), 1) - len(self._open)
        number = first
        for key, block_id in zip(keys, ids, strict=True):
            if key.digest not in self._stored:
                if room <= len(orders):
                    break
                self.remember([key.digest])
                save, start = next(self._numbers), number * self._block
                orders.append(SaveOrder(save, key.digest, block_id, start, width, tenant))
            number += 1
        pins.pin(order.block_id for order in orders)
        self._open.update((order.save, (order.key, order.block_id)) for order in orders)
        return number, orders

    def heard(self, outcomes: Iterable[SaveOutcome], pins: Pins) -> None:
        """Blocks were copied, or given up."""
        for outcome in outcomes:
            key, block_id = self._open.pop(outcome.save)
            pins.unpin([block_id])
            if not outcome.taken:
                self.dropped += 1
                self._stored.pop(key, None)

    def abandon(self, pins: Pins) -> None:
        """Nothing will be copied any more."""
        self.heard([SaveOutcome(save, taken=False) for save in self._open], pins)

    def remember(self, keys: Iterable[bytes]) -> None:
        """These are stored, or about to be."""
        for key in keys:
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)

    def forget(self) -> None:
        """Nothing is known to be stored any more."""
        self._stored.clear()

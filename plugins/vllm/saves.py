"""Which blocks to store: those that a step completes, once each, within a share of the pool.

Belongs to the scheduler's thread. A block is pinned from the step that completes it until the
worker has copied it; what does not fit under the cap is tried again with the request's next step,
and given up with its end. A block counts as stored until it turns out that it is not: then the next
request that has it stores it again.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from cacheflow.plugins.vllm.records import SaveOrder, SaveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from cacheflow.plugins.vllm.keyring import Keyring, Request
    from cacheflow.plugins.vllm.pins import Pins
    from cacheflow.types import ChunkKey

__all__ = ["Blocks", "SaveBook", "Saves"]

_REMEMBERED: Final = 1 << 16
"""Keys of blocks that are known to be stored."""
_NEVER: Final = 1 << 62
"""Beyond the last block of a request that has no keys."""


class Blocks(Protocol):
    """The part of vLLM's KVCacheManager that is used."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]: ...

    def allocate_slots(
        self, request: Any, num_new_tokens: int, *, delay_cache_blocks: bool
    ) -> object | None: ...

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None: ...


class SaveBook:
    """``share``: of the pool's blocks that may be held for saving at a time."""

    def __init__(self, block: int, share: float = 0.25) -> None:
        self._block = block
        self._share = share
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._pinned: dict[int, int] = {}
        """Save -> block id, until the block is copied."""
        self._under_way: dict[int, bytes] = {}
        """Save -> key, until the save has ended."""
        self._being_stored: set[bytes] = set()
        """Those keys."""
        self._numbers = count(1)

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
        room = max(int(pins.size * self._share), 1) - len(self._pinned)
        number = first
        for key, block_id in zip(keys, ids, strict=True):
            if key.digest not in self._stored and key.digest not in self._being_stored:
                if room <= len(orders):
                    break
                save, start = next(self._numbers), number * self._block
                orders.append(SaveOrder(save, key.digest, block_id, start, width, tenant))
            number += 1
        pins.pin(order.block_id for order in orders)
        self._pinned.update((order.save, order.block_id) for order in orders)
        self._under_way.update((order.save, order.key) for order in orders)
        self._being_stored.update(order.key for order in orders)
        return number, orders

    def copied(self, saves: Iterable[int], pins: Pins) -> None:
        """The blocks of these are needed no more."""
        pins.unpin(self._pinned.pop(save) for save in saves)

    def ended(self, outcomes: Iterable[SaveOutcome]) -> None:
        """Saves whose blocks were copied have ended."""
        for outcome in outcomes:
            key = self._under_way.pop(outcome.save)
            self._being_stored.discard(key)
            if outcome.stored:
                self.remember([key])

    def abandon(self, pins: Pins) -> None:
        """Nothing will be copied any more."""
        self.copied(list(self._pinned), pins)
        self._under_way.clear()
        self._being_stored.clear()

    def remember(self, keys: Iterable[bytes]) -> None:
        """These are stored."""
        for key in keys:
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)

    def missed(self, keys: Iterable[bytes]) -> None:
        """These are not there, or cannot be had, whatever was known of them."""
        for key in keys:
            self._stored.pop(key, None)

    def forget(self) -> None:
        """Nothing is known to be stored any more."""
        self._stored.clear()


class Saves:
    """How far each request's blocks were looked at."""

    def __init__(
        self, keyring: Keyring, book: SaveBook, cache: Blocks, pins: Pins, block: int
    ) -> None:
        self._keyring = keyring
        self._book = book
        self._cache = cache
        self._pins = pins
        self._block = block
        self._planned: dict[str, int] = {}
        """Request -> the first block that was not looked at."""
        self._held: list[SaveOrder] = []

    def plan(self, request: Request, done: int, width: int) -> list[SaveOrder]:
        """Orders for the blocks of ``request`` that its first ``done`` tokens complete, the last of
        them in a forward pass of ``width`` tokens."""
        block = self._block
        first = self._planned.get(request.request_id, 0)
        complete = min(done, len(request.all_token_ids)) // block
        if complete <= first:
            return []
        keys = self._keyring.keys(request, complete * block)
        if keys is None:
            self._planned[request.request_id] = _NEVER
            return []
        ids = self._cache.get_block_ids(request.request_id)[0][first:complete]
        tenant = self._keyring.tenant(request)
        self._planned[request.request_id], orders = self._book.plan(
            first, keys[first:complete], ids, self._pins, width=width, tenant=tenant
        )
        return orders

    def hold(self, orders: Iterable[SaveOrder]) -> None:
        """Keep these until it is known whether what the step computed is right."""
        self._held += orders

    def take_held(self) -> list[SaveOrder]:
        """Those of the last step, which may be given out."""
        held, self._held = self._held, []
        return held

    def drop_held(self, stale: AbstractSet[int] | None = None) -> None:
        """Store none of those that are held and copy a ``stale`` block (None: none at all)."""
        dropped = [o for o in self._held if stale is None or o.block_id in stale]
        self._held = [o for o in self._held if o not in dropped]
        self._book.copied([order.save for order in dropped], self._pins)
        self._book.ended([SaveOutcome(order.save, stored=False) for order in dropped])

    def rewind(self, request_id: str, block: int) -> None:
        """Blocks from ``block`` on are computed again."""
        if request_id in self._planned:
            self._planned[request_id] = min(self._planned[request_id], block)

    def finished(self, request_id: str) -> None:
        self._planned.pop(request_id, None)

    def renew(self) -> None:
        """All keys are new: everything is to be stored again."""
        self._book.forget()
        self._planned.clear()

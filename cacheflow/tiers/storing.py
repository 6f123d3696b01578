"""One batch of writes: room for it first, then the backend, then the truth about what came of it.

Room is made by one batch at a time, so what was deleted for one is not counted on by another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, CacheFlowError, CapacityError
from cacheflow.seldom import Seldom
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.tiers.catalogue import Leaving
    from cacheflow.tiers.changes import Look
    from cacheflow.tiers.keeper import Keeper
    from cacheflow.tiers.stock import Stock
    from cacheflow.types import Write

__all__ = ["Storing"]

_log = logging.getLogger(__name__)

_UNCHANGED: Final = frozenset({TransferStatus.FULL, TransferStatus.REFUSED})
"""After these nothing of the object is there; after other failures nobody knows."""
_REASONS: Final = {
    "capacity": "the object is larger than setting capacity_bytes",
    "quota": "the object is larger than setting tenant_quota_bytes",
    "leased": "all that could make room is being read or was just looked up",
    "opening": "what is there is still being listed",
}


class Storing:
    """What :meth:`Tier.store` does with a batch that fits its budget."""

    def __init__(self, stock: Stock, keeper: Keeper) -> None:
        self._stock = stock
        self._keeper = keeper
        self._making_room = asyncio.Lock()
        self._seldom = Seldom(stock.clock)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """Results in the order given."""
        results: dict[int, TransferResult] = {}
        pending: dict[int, Write] = {}
        """Writes for which there is room and of which nobody knows yet how they ended."""
        was_asked = False
        try:
            await self._make_room(writes, pending, results)
            if pending:
                places, asked = list(pending), list(pending.values())
                with self._stock.changes.storing(write.info.key for write in asked) as change:
                    was_asked = True
                    ended = await self._store(asked)
                    for place, result in zip(places, ended, strict=True):
                        results[place] = result
                        self._ended(pending.pop(place), result, change)
        finally:
            for write in pending.values():
                self._release(write)
                if was_asked:
                    self._doubt(write)
        self._stock.tell_usage()
        return [results[place] for place in range(len(writes))]

    async def _make_room(
        self,
        writes: Sequence[Write],
        pending: dict[int, Write],
        results: dict[int, TransferResult],
    ) -> None:
        """Evict for ``writes``; each is ``pending`` afterwards or has its result."""
        stock = self._stock
        async with self._making_room:
            leaving: list[Leaving] = []
            for place, write in enumerate(writes):
                info = write.info
                room = stock.catalogue.make_room(info.nbytes, info.tenant_id, stock.clock.now())
                if room.refused:
                    results[place] = self._refused(write, room.refused)
                else:
                    pending[place] = write
                    leaving += room.leaving
            if (error := await self._evict(leaving)) is not None:
                for place, write in pending.items():
                    self._release(write)
                    results[place] = TransferResult(write, TransferStatus.FAILED, 0, 0.0, error)
                pending.clear()

    async def _store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """A backend that is full has less room than was believed: evict, and try once more."""
        inner = self._stock.inner
        results = await inner.store(writes)
        full = [at for at, result in enumerate(results) if result.status is TransferStatus.FULL]
        if full and await self._free(sum(writes[at].info.nbytes for at in full)):
            again = await inner.store([writes[at] for at in full])
            for at, result in zip(full, again, strict=True):
                results[at] = result
        return results

    async def _free(self, nbytes: int) -> bool:
        """Whether ``nbytes`` or less were evicted. This batch is not in the catalogue yet."""
        stock = self._stock
        async with self._making_room:
            leaving = stock.catalogue.take(nbytes, "full", stock.clock.now())
            is_shared = stock.inner.capabilities.shared
            if not leaving and is_shared and self._keeper.is_stale():
                await self._keeper.rescan()  # it was filled by others
                leaving = stock.catalogue.take(nbytes, "full", stock.clock.now())
            return await self._evict(leaving) is None and bool(leaving)

    async def _evict(self, leaving: Sequence[Leaving]) -> CacheFlowError | None:
        """The error, if it failed: then there is no room."""
        stock = self._stock
        try:
            await stock.evict(leaving)
        except Exception as error:  # a third party's backend may raise anything
            self._keeper.kick()
            why = str(error) or type(error).__name__
            if times := self._seldom.add(type(error).__name__, 1):
                more = f" ({times} times)" if times > 1 else ""
                _log.warning("tier %s: nothing could be evicted: %s%s", stock.channel, why, more)
            if isinstance(error, CacheFlowError):
                return error
            return BackendError(why, operation="delete", context=stock.channel)
        return None

    # -- how a write ended ---------------------------------------------------------------------

    def _ended(self, write: Write, result: TransferResult, change: Look) -> None:
        self._release(write)
        if result.status is TransferStatus.OK and change.is_only_store(write.info.key):
            self._stock.arrived(write.info)
        elif result.status not in _UNCHANGED:
            self._doubt(write)
        elif result.status is TransferStatus.FULL:
            self._stock.dropped("full", 1, write.info.nbytes)

    def _refused(self, write: Write, reason: str) -> TransferResult:
        self._stock.dropped(reason, 1, write.info.nbytes)
        why = f"tier {self._stock.channel}: no room for {write.info.nbytes} bytes: "
        error = CapacityError(why + _REASONS[reason])
        return TransferResult(write, TransferStatus.FULL, 0, 0.0, error)

    def _release(self, write: Write) -> None:
        self._stock.catalogue.release(write.info.nbytes, write.info.tenant_id)

    def _doubt(self, write: Write) -> None:
        info, holds = write.info, tuple(part.hold for part in write.parts)
        self._stock.doubt(info.key, info.nbytes, info.tenant_id, holds)
        self._keeper.kick()

"""The worker's stores: complete blocks out of vLLM's cache, sealed, into every tier.

A block is copied into staging memory first; from then on its place in the cache may be reused, and
the scheduler is told so. What cannot be staged soon, or is not taken, is dropped and counted, and
the scheduler is told that too: the block is stored when it is there again. Stores give way to the
loads of their tier as long as there is staging memory for what comes. Lives on the depot's event
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import CacheFlowError
from cacheflow.kv import Stamp, seal
from cacheflow.memory import buffer_from
from cacheflow.plugins.vllm.records import SaveOutcome
from cacheflow.tasks import Pulse, to_the_end
from cacheflow.tiers import StoreGate, stores_at_once
from cacheflow.types import ChunkKey, ObjectKey, Segment, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.memory import Lease
    from cacheflow.plugins.vllm.finder import Finder
    from cacheflow.plugins.vllm.means import Means
    from cacheflow.plugins.vllm.records import SaveOrder

__all__ = ["STORES", "Provenance", "Saver"]

_log = logging.getLogger(__name__)

STORES: Final = "stores"
"""Owner of staging memory."""
_STAGE_SECONDS: Final = 2.0
"""A block that finds no staging memory for this long is dropped."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is written into every object's header."""

    layout_id: str
    grid_id: str
    model_id: bytes


class Saver:
    """Takes orders one after the other; stores run side by side as staging memory allows."""

    def __init__(self, means: Means, finder: Finder, provenance: Provenance) -> None:
        self._means = means
        self._finder = finder
        self._provenance = provenance
        self.copied: deque[int] = deque()
        """Saves whose block is free, until they are told."""
        self.outcomes: deque[SaveOutcome] = deque()
        """Saves that have ended, until they are told."""
        self._orders: asyncio.Queue[SaveOrder] = asyncio.Queue()
        self._stores: set[asyncio.Task[None]] = set()
        self._tiers = [
            name
            for name, tier in means.tiers.items()
            if means.shard.stores or not tier.capabilities.shared
        ]
        """Those that have to be given what this rank holds: of ranks with the same heads one stores
        them where all can read them."""
        self._pulse = Pulse()
        means.traffic.when_quiet(self._pulse.beat)
        self._waiting = 0
        """Who waits for stores: for their staging memory, or for all of them."""
        self._gates = {
            name: StoreGate(
                name, means.traffic, self._pulse, means.clock, lambda: self._waiting > 0
            )
            for name in self._tiers
        }
        self._turns = {
            name: asyncio.Semaphore(stores_at_once(means.tiers[name].capabilities.suggested_depth))
            for name in self._tiers
        }

    def put(self, order: SaveOrder) -> None:
        """Queue an order; its outcome says when the block is free."""
        self._orders.put_nowait(order)

    async def run(self) -> None:
        """Take blocks until cancelled; then what is staged is given up too."""
        try:
            while True:
                await self._take(await self._orders.get())
        finally:
            for task in self._stores:
                task.cancel()
            if self._stores:
                await asyncio.wait(self._stores)

    async def settled(self) -> None:
        """Return when everything that was staged is stored or given up."""
        with self._waited_for():
            while self._stores:
                await asyncio.wait(self._stores)

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Inside, no store gives way."""
        self._waiting += 1
        self._pulse.beat()
        try:
            yield
        finally:
            self._waiting -= 1

    async def _take(self, order: SaveOrder) -> None:
        means = self._means
        if not self._tiers:
            self._free(order)
            self._end(order, stored=True)
            return
        try:
            lease = await self._staging()
        except (TimeoutError, CacheFlowError):
            means.counts.add("store_dropped", "all", "staging")
            self._free(order)
            self._end(order, stored=False)
            return
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(means.threads, means.memory.read, order.block_id, lease.buffer)
        try:
            await to_the_end(copy)  # it reads and writes memory that would be used again
        except BaseException:
            lease.release()
            raise
        self._free(order)
        task = asyncio.create_task(self._store(order, lease))
        self._stores.add(task)
        task.add_done_callback(self._stores.discard)

    async def _staging(self) -> Lease:
        """Memory for one block.

        Raises:
            TimeoutError: there was none for too long.
            CacheFlowError: there is none any more.
        """
        pool, nbytes = self._means.pool, self._means.memory.nbytes
        if (lease := pool.try_lease(nbytes, STORES)) is not None:
            return lease
        with self._waited_for():
            async with asyncio.timeout(_STAGE_SECONDS):
                return await pool.lease(nbytes, STORES)

    def _free(self, order: SaveOrder) -> None:
        self.copied.append(order.save)
        self._means.changed()

    def _end(self, order: SaveOrder, *, stored: bool) -> None:
        self.outcomes.append(SaveOutcome(order.save, stored))
        self._means.changed()

    async def _store(self, order: SaveOrder, lease: Lease) -> None:
        """Into every tier that has not got it."""
        stored = False
        try:
            with lease:
                have = await asyncio.gather(*(self._has(name, order) for name in self._tiers))
                lacking = [name for name, has in zip(self._tiers, have, strict=True) if not has]
                stored = not lacking or await self._store_in_all(lacking, order, lease)
        except Exception as error:  # one block is not stored; the others are
            _log.error("a store ended unexpectedly", exc_info=error)
        finally:
            self._end(order, stored=stored)

    async def _store_in_all(self, names: Sequence[str], order: SaveOrder, lease: Lease) -> bool:
        loop = asyncio.get_running_loop()
        sealing = loop.run_in_executor(self._means.threads, self._sealed, order, lease)
        write = await to_the_end(sealing)
        ends = await asyncio.gather(*(self._store_in(name, write) for name in names))
        refused = {*ends} - {TransferStatus.OK}
        somewhere = TransferStatus.OK in ends or len(names) < len(self._tiers)
        # A tier that is full stays so for now: what another one has is not offered again.
        return not refused or (somewhere and refused == {TransferStatus.FULL})

    async def _has(self, name: str, order: SaveOrder) -> bool:
        """Whether a tier has the block already, packed as this engine packs."""
        key = ChunkKey(order.key)
        try:
            async with asyncio.timeout(self._means.deadline):
                (there,) = await self._means.tiers[name].lookup([key])
        except Exception as error:  # a third party's backend may raise anything: the store will say
            _log.debug("tier %s: lookup before a store: %s", name, error)
            return False
        return self._finder.where(name, key, there) is not None

    def _sealed(self, order: SaveOrder, lease: Lease) -> Write:
        shard, layout = self._means.shard, self._means.shard.whole
        view = lease.buffer.view
        assert view is not None, "staging memory of a worker is host memory"
        info, header = seal(
            ObjectKey(ChunkKey(order.key), shard.layers, shard.heads),
            layout,
            view,
            grid_id=self._provenance.grid_id,
            segments=(Segment(order.start, order.start + layout.chunk_tokens, order.width),),
            canonical=False,
            stamp=Stamp(self._provenance.model_id, order.tenant),
            layout_id=self._provenance.layout_id,
        )
        return Write(info, (buffer_from(header), lease.part(0, len(view))))

    async def _store_in(self, name: str, write: Write) -> TransferStatus:
        means, gate = self._means, self._gates[name]
        try:
            async with self._turns[name]:
                await gate.passed()
                begun = means.clock.now()
                async with asyncio.timeout(means.deadline):
                    (result,) = await means.tiers[name].store([write])
                gate.took(means.clock.now() - begun)
        except Exception as error:  # a third party's backend may raise anything: it is not stored
            _log.warning("tier %s: not stored: %s", name, str(error) or type(error).__name__)
            means.counts.add("store_dropped", name, "failed")
            return TransferStatus.FAILED
        if result.status is TransferStatus.OK:
            means.counts.add("transfer_bytes", name, "store", amount=result.nbytes)
        else:
            means.counts.add("store_dropped", name, result.status.value)
        return result.status

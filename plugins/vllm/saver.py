"""The worker's stores: complete blocks out of vLLM's cache, sealed, into every tier.

A block is copied into staging memory first; from then on its place in the cache may be reused, and
the scheduler is told so. What cannot be staged soon is dropped and counted: it is recomputed when
it is needed. Lives on the depot's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import CacheFlowError
from cacheflow.kv import Stamp, seal
from cacheflow.memory import buffer_from
from cacheflow.plugins.vllm.records import SaveOutcome
from cacheflow.types import ChunkKey, ObjectKey, Segment, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from cacheflow.abc import StorageBackend
    from cacheflow.memory import Lease, StagingPool
    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.counts import Counts
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

    def __init__(
        self,
        tiers: Mapping[str, StorageBackend],
        memory: BlockMemory,
        provenance: Provenance,
        pool: StagingPool,
        threads: Executor,
        deadline: float,
        changed: Callable[[], None],
        counts: Counts,
    ) -> None:
        self._tiers = tiers
        self._memory = memory
        self._provenance = provenance
        self._pool = pool
        self._threads = threads
        self._deadline = deadline
        self._changed = changed
        self._counts = counts
        self.outcomes: deque[SaveOutcome] = deque()
        self._orders: asyncio.Queue[SaveOrder] = asyncio.Queue()
        self._stores: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether anything is still to be taken or stored."""
        return bool(self._stores) or not self._orders.empty()

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
        while self._stores:
            await asyncio.wait(self._stores)

    async def _take(self, order: SaveOrder) -> None:
        try:
            async with asyncio.timeout(_STAGE_SECONDS):
                lease = await self._pool.lease(self._memory.nbytes, STORES)
        except (TimeoutError, CacheFlowError):
            self._counts.add("store_dropped", "all", "staging")
            self._tell(order, taken=False)
            return
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(self._threads, self._memory.read, order.block_id, lease.buffer)
        try:
            await copy
        except BaseException:
            lease.release()
            raise
        self._tell(order, taken=True)
        task = asyncio.create_task(self._store(order, lease))
        self._stores.add(task)
        task.add_done_callback(self._stores.discard)

    def _tell(self, order: SaveOrder, *, taken: bool) -> None:
        self.outcomes.append(SaveOutcome(order.save, taken))
        self._changed()

    async def _store(self, order: SaveOrder, lease: Lease) -> None:
        key = ChunkKey(order.key)
        with lease:
            loop = asyncio.get_running_loop()
            write = await loop.run_in_executor(self._threads, self._sealed, order, lease)
            await asyncio.gather(*(self._store_in(name, key, write) for name in self._tiers))

    def _sealed(self, order: SaveOrder, lease: Lease) -> Write:
        layout = self._memory.layout
        view = lease.buffer.view
        assert view is not None, "staging memory of a worker is host memory"
        info, header = seal(
            ObjectKey(
                ChunkKey(order.key), Span(0, layout.num_layers), Span(0, layout.num_kv_heads)
            ),
            layout,
            view,
            grid_id=self._provenance.grid_id,
            segments=(Segment(order.start, order.start + layout.chunk_tokens, order.width),),
            canonical=False,
            stamp=Stamp(self._provenance.model_id, order.tenant),
            layout_id=self._provenance.layout_id,
        )
        return Write(info, (buffer_from(header), lease.part(0, len(view))))

    async def _store_in(self, name: str, key: ChunkKey, write: Write) -> None:
        """Store in one tier, unless it has the block already."""
        backend = self._tiers[name]
        try:
            async with asyncio.timeout(self._deadline):
                (there,) = await backend.lookup([key])
                if any(info.layout_id == write.info.layout_id for info in there):
                    return
                (result,) = await backend.store([write])
        except Exception as error:  # a third party's backend may raise anything: it is not stored
            _log.warning("tier %s: not stored: %s", name, str(error) or type(error).__name__)
            self._counts.add("store_dropped", name, "failed")
            return
        if result.status is TransferStatus.OK:
            self._counts.add("transfer_bytes", name, "store", amount=result.nbytes)
        else:
            self._counts.add("store_dropped", name, result.status.value)

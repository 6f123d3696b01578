"""The worker's side: tiers, loads and saves on an event loop in a thread of its own.

The worker's main thread hands over orders before a forward pass and takes a report after it; it
waits only for block copies, and for a moment when there is nothing to compute. Knows nothing of
vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from cacheflow.clock import SystemClock
from cacheflow.costs import COSTS_FILE, CostStore, channel_key
from cacheflow.errors import CacheFlowError, ConfigError
from cacheflow.memory import StagingPool
from cacheflow.plugins.vllm.counts import Counts
from cacheflow.plugins.vllm.finder import Finder
from cacheflow.plugins.vllm.loader import OUTSIDE, Loader
from cacheflow.plugins.vllm.means import Means
from cacheflow.plugins.vllm.overlaps import Overlaps
from cacheflow.plugins.vllm.records import Report
from cacheflow.plugins.vllm.saver import STORES, Saver
from cacheflow.plugins.vllm.settings import OUTSIDE_SHARE
from cacheflow.registry import load_backend
from cacheflow.tiers import Guarded, Traffic, front

if TYPE_CHECKING:
    from collections import deque

    from cacheflow.abc import StorageBackend
    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.records import Orders
    from cacheflow.plugins.vllm.saver import Provenance
    from cacheflow.plugins.vllm.settings import VllmSettings
    from cacheflow.types import Shard

__all__ = ["Depot"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_OPEN_SECONDS: Final = 120.0
_CLOSE_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 0.005
"""Longest wait for a load in a step that computes nothing: new requests wait as long."""


class Depot:
    """Everything the worker does for CacheFlow. Made, used and closed by the worker's main thread.

    Raises:
        ConfigError: a tier cannot be opened, or one block does not fit the staging memory.
    """

    def __init__(
        self, settings: VllmSettings, memory: BlockMemory, shard: Shard, provenance: Provenance
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._shard = shard
        self._provenance = provenance
        self._news = threading.Event()
        self.counts = Counts()
        self.overlaps = Overlaps(memory.layout.num_layers, SystemClock())
        self._threads = ThreadPoolExecutor(2, "cacheflow-copy", initializer=_use_any_core)
        self._ready: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._loader: Loader
        self._saver: Saver
        self._thread = threading.Thread(target=self._run, name="cacheflow-depot", daemon=True)
        self._thread.start()
        self._ready.result(_OPEN_SECONDS)

    # -- the worker's main thread --------------------------------------------------------------

    def carry_out(self, orders: Orders) -> None:
        """Take the orders of a step. Claims hold, and what is staged is in place, on return."""
        loader = self._loader
        self.overlaps.begin(orders.computes)
        for restore_id, top in orders.tops.items():
            if restore := loader.restores.get(restore_id):
                restore.cut(top)
        for restore_id, block in orders.claims.items():
            if restore := loader.restores.get(restore_id):
                restore.take(block)
        for restore_id, (first, ids) in orders.targets.items():
            if restore := loader.restores.get(restore_id):
                restore.aim(self._memory, first, ids)
        for restore_id, overlap in orders.overlaps.items():
            self.overlaps.read(loader.restores.get(restore_id), overlap)
        if orders or loader.starved:
            self._call(orders)
        if orders.idle and self._news.wait(_IDLE_SECONDS):
            self._news.clear()

    def save(self, orders: Orders) -> None:
        """Take the saves of a step whose forward pass has ended."""
        self.overlaps.end()
        if orders.saves:
            with suppress(RuntimeError):  # the loop is closed: the worker is on its way out
                self._loop.call_soon_threadsafe(self._put, orders)

    def report(self) -> Report:
        """What happened since the last report."""
        loader, saver = self._loader, self._saver
        if lost := not self._thread.is_alive():
            loader.abandon()
        restores = [r for r in list(loader.restores.values()) if r.found is not None]
        return Report(
            found={r.id: r.found for r in restores if r.found is not None},
            progress={r.id: loader.progress(r) for r in restores},
            ended=_taken(loader.ended),
            copied=_taken(saver.copied),
            saves=_taken(saver.outcomes),
            missed=_taken(loader.missed),
            by_layer=self.overlaps.take_news(),
            lost=lost,
        )

    def close(self) -> None:
        """Store what is staged, within bounds, and stop. Idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                _log.error("storage does not end; it is left behind")

    def _call(self, orders: Orders) -> None:
        with suppress(RuntimeError):  # the loop is closed: the worker is on its way out
            self._loop.call_soon_threadsafe(self._take, orders)

    # -- the event loop ------------------------------------------------------------------------

    def _take(self, orders: Orders) -> None:
        for restore_id in orders.closed:
            self._loader.close(restore_id)
        for opened in orders.opened:
            self._loader.open(opened)
        for restore_id, blocks in orders.tails.items():
            self._loader.arrange(restore_id, blocks)
        self._loader.pump()

    def _put(self, orders: Orders) -> None:
        for order in orders.saves:
            self._saver.put(order)

    def _run(self) -> None:
        _use_any_core()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # whatever ends the thread is for whoever started it
            if self._ready.done():
                _log.exception("storage thread died: requests are computed from now on")
            else:
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._threads.shutdown, wait=False)
            tiers = await self._open_tiers(stack)
            pool = self._pool()
            stack.push_async_callback(pool.aclose)
            for tier in tiers.values():
                stack.callback(tier.register_memory(pool.arena))
            self._build(tiers, pool)
            await asyncio.to_thread(self._remember)
            stack.push_async_callback(asyncio.to_thread, self._keep)
            saving = asyncio.create_task(self._saver.run())
            self._ready.set_result(None)
            await self._end.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS / 2):
                    await self._saver.settled()
            for restore_id in list(self._loader.restores):
                self._loader.close(restore_id)
            saving.cancel()
            await asyncio.wait([saving])

    async def _open_tiers(self, stack: AsyncExitStack) -> dict[str, StorageBackend]:
        tiers: dict[str, StorageBackend] = {}
        for tier in self._settings.tiers:
            kind = await asyncio.to_thread(load_backend, tier.backend)
            opened = await kind.open(tier.options)
            guarded = Guarded(opened, tier.name, deadline=self._settings.load_deadline)
            backend = tiers[tier.name] = await front(guarded, tier)
            stack.push_async_callback(_close, tier.name, backend)
        return tiers

    def _pool(self) -> StagingPool:
        nbytes, block = int(self._settings.staging_bytes), self._memory.nbytes
        if nbytes < 4 * block:
            raise ConfigError(
                f"setting staging_bytes: {nbytes} bytes are too few for blocks of {block} bytes; "
                f"give at least {4 * block}"
            )
        pool = StagingPool(nbytes)
        pool.set_cap(OUTSIDE, max(int(nbytes * OUTSIDE_SHARE), block))
        pool.set_cap(STORES, max(nbytes // 4, block))
        return pool

    def _build(self, tiers: dict[str, StorageBackend], pool: StagingPool) -> None:
        deadline = self._settings.load_deadline
        means = Means(
            tiers,
            self._memory,
            self._shard,
            pool,
            self._threads,
            SystemClock(),
            deadline,
            self._news.set,
            self.overlaps.poke,
            self.counts,
            Traffic(),
        )
        layout_id = self._provenance.layout_id
        finder = Finder(tiers, self._shard, layout_id, deadline, self.counts)
        self._loader = Loader(means, finder)
        self._saver = Saver(means, finder, self._provenance)

    def _remember(self) -> None:
        """Begin with what earlier processes learned about the tiers."""
        if self._settings.keep_costs:
            store = CostStore(self._settings.cache_dir / COSTS_FILE)
            for name, key in self._channel_keys().items():
                if (profile := store.channel(key)) is not None:
                    self._loader.channels[name].prime(profile)

    def _keep(self) -> None:
        """Leave what was learned to later processes."""
        if self._settings.keep_costs:
            learned = {n: self._loader.channels[n].profile() for n in self._channel_keys()}
            keys = self._channel_keys()
            known = {keys[name]: profile for name, profile in learned.items() if profile}
            CostStore(self._settings.cache_dir / COSTS_FILE).save({}, known)

    def _channel_keys(self) -> dict[str, str]:
        tiers = self._settings.tiers
        return {tier.name: channel_key(tier.name, tier.backend, tier.options) for tier in tiers}


def _taken(said: deque[T]) -> list[T]:
    """What the event loop has said so far; it may go on meanwhile."""
    return [said.popleft() for _ in range(len(said))]


async def _close(name: str, backend: StorageBackend) -> None:
    try:
        await backend.aclose()
    except CacheFlowError as error:
        _log.warning("tier %s: closing failed: %s", name, error)


def _use_any_core() -> None:
    """vLLM binds the worker's main thread to one core, which its children inherit: storage would
    then take its time from the very core that computes."""
    with suppress(OSError, AttributeError):  # not on this system, or not permitted
        os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))

"""The worker's loads: each restore's blocks from the last one down, verified, then put in place.

Lives on the depot's event loop. Loads land in leased staging memory; a block goes into vLLM's cache
only when every byte was verified and compute has not claimed it (one lock a restore, shared with
the thread that runs the forward passes). A load that fails, is late or missing ends its restore
there: compute takes what is below.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheflow.costs import ChannelModel
from cacheflow.errors import ClosedError, IntegrityError
from cacheflow.kv import verify
from cacheflow.plugins.vllm.finder import longest_run
from cacheflow.plugins.vllm.records import Found, Progress
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import Lease, StagingPool
    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.plugins.vllm.finder import Finder
    from cacheflow.plugins.vllm.records import Opened
    from cacheflow.types import ChunkInfo

__all__ = ["INSIDE", "OUTSIDE", "Loader", "Restoring"]

_log = logging.getLogger(__name__)

INSIDE: Final = "loads"
OUTSIDE: Final = "loads ahead"
"""Owners of staging memory: restores that have blocks, and those that wait outside the batch."""
_LEAST_DEPTH: Final = 2
"""Loads asked for at a time, so that the next one is on its way while one is checked."""


class LoadFailed(Exception):
    """One block did not arrive; says why. Never leaves this module."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Restoring:
    """One restore. Fields are the event loop's, except those under ``lock``."""

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
    landed: dict[int, Lease | None] = field(default_factory=dict)
    """Under the lock: verified blocks, with their lease while they are only staged."""
    low: int = 0
    claim: int = 0
    """Under the lock: blocks below are compute's."""
    targets: tuple[int, tuple[int, ...]] | None = None
    closed: bool = False

    def target(self, block: int) -> int | None:
        """Block id to copy ``block`` to, if it is known and compute has not claimed it."""
        if self.targets is None or self.closed or block < self.claim:
            return None
        first, ids = self.targets
        return ids[block - first] if first <= block < first + len(ids) else None

    def settle(self) -> None:
        """Find anew how far down everything is there; a refused copy may have made a gap."""
        assert self.found is not None
        with self.lock:
            low = self.found.top
            while low - 1 in self.landed:
                low -= 1
            self.low = low


class Loader:
    """All restores of one worker, served first come first, over all tiers."""

    def __init__(
        self,
        tiers: Mapping[str, StorageBackend],
        memory: BlockMemory,
        finder: Finder,
        pool: StagingPool,
        threads: Executor,
        clock: Clock,
        deadline: float,
        changed: Callable[[], None],
        counts: Counts,
    ) -> None:
        self._tiers = tiers
        self._memory = memory
        self._finder = finder
        self._pool = pool
        self._threads = threads
        self._clock = clock
        self._deadline = deadline
        self._changed = changed
        self.restores: dict[int, Restoring] = {}
        self.ended: deque[int] = deque()
        """Restores that are over, until they are told."""
        self._counts = counts
        self.channels = {name: ChannelModel() for name in tiers}
        self._flying: dict[str, set[Lease]] = {name: set() for name in tiers}
        """Loads on their way, by the memory they land in."""
        self._loads = 0
        self.starved = False
        """Some load found no staging memory: ask again."""

    # -- on the event loop ---------------------------------------------------------------------

    def open(self, order: Opened) -> None:
        """Begin to look for the blocks of a restore, and to load what is found."""
        restore = Restoring(order.restore, order.first, order.keys, self._clock.now())
        self.restores[order.restore] = restore
        restore.lookup = asyncio.create_task(self._look_up(restore))

    def close(self, restore_id: int) -> None:
        """End a restore, whatever it is doing; told as ended when nothing of it can write."""
        restore = self.restores.get(restore_id)
        if restore is None:  # it ended before
            self.ended.append(restore_id)
            return
        with restore.lock:
            restore.closed = True
        tasks = [*restore.tasks.values(), *([restore.lookup] if restore.lookup else ())]
        for task in tasks:
            task.cancel()
        with restore.lock:  # a copy under way has ended now; another cannot begin
            for lease in restore.landed.values():
                if lease is not None:
                    lease.release()
            restore.landed.clear()
        del self.restores[restore_id]
        self.ended.append(restore_id)
        self.pump()

    def pump(self) -> None:
        """Start the loads that are due: on every tier the oldest restore's highest block."""
        self.starved = False
        for tier in self._tiers:
            while len(self._flying[tier]) < max(self.channels[tier].depth, _LEAST_DEPTH):
                chosen = self._next(tier)
                if chosen is None:
                    break
                restore, block, lease = chosen
                self._flying[tier].add(lease)
                task = asyncio.create_task(self._load(restore, block, tier, lease))
                restore.tasks[block] = task
                task.add_done_callback(partial(self._done, restore, block, tier, lease))

    def _next(self, tier: str) -> tuple[Restoring, int, Lease] | None:
        """What to load next over ``tier``, and where to; a restore that finds no staging memory is
        passed over, for memory of requests that are outside the batch comes back late."""
        for restore in self.restores.values():
            waiting = restore.waiting.get(tier)
            if not waiting or waiting[-1] < max(restore.stop, restore.claim):
                continue
            owner = OUTSIDE if restore.targets is None else INSIDE
            try:
                lease = self._pool.try_lease(self._memory.nbytes, owner)
            except ClosedError:  # the worker is on its way out
                return None
            if lease is not None:
                return restore, waiting.pop(), lease
            self.starved = True
        return None

    def _done(
        self, restore: Restoring, block: int, tier: str, lease: Lease, task: asyncio.Task[None]
    ) -> None:
        restore.tasks.pop(block, None)
        self._flying[tier].discard(lease)
        if task.cancelled():  # perhaps before it began: then nobody else gives its memory back
            lease.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a load ended unexpectedly", exc_info=error)
            restore.stop = max(restore.stop, block + 1)
        if not task.cancelled():
            self.pump()
        if restore.low <= max(restore.stop, restore.claim):
            self._changed()  # complete, or over: the scheduler should know at once

    async def _look_up(self, restore: Restoring) -> None:
        restore.stored = await self._finder.find(restore.first, restore.keys)
        bottom, top = longest_run(restore.stored)
        for block in range(bottom, top):
            restore.waiting.setdefault(restore.stored[block][0], []).append(block)
        restore.low, restore.stop = top, bottom
        restore.since = self._clock.now()
        restore.found = Found(bottom, top)
        self.pump()
        self._changed()

    # -- loading -------------------------------------------------------------------------------

    async def _load(self, restore: Restoring, block: int, tier: str, lease: Lease) -> None:
        info = restore.stored[block][1]
        try:
            async with asyncio.timeout(self._deadline):
                await self._read(info, tier, lease)
                await self._verify(info, lease)
        except (LoadFailed, TimeoutError) as error:
            lease.release()
            reason = error.reason if isinstance(error, LoadFailed) else "late"
            why = str(error) or "no answer within the deadline"
            _log.warning("tier %s: block %d is recomputed: %s", tier, block, why)
            self._counts.add("load_failures", tier, reason)
            restore.stop = max(restore.stop, block + 1)
            return
        except BaseException:
            lease.release()
            raise
        await self._land(restore, block, lease)
        self._counts.add("transfer_bytes", tier, "load", amount=self._memory.nbytes)

    async def _read(self, info: ChunkInfo, tier: str, lease: Lease) -> None:
        """The object's payload into staging memory; then the next load of the tier may begin."""
        try:
            await self._fetch(info, tier, lease)
        finally:
            self._flying[tier].discard(lease)
        self.pump()  # not when it is cancelled: then nothing new should begin

    async def _fetch(self, info: ChunkInfo, tier: str, lease: Lease) -> None:
        offset, nbytes = info.layer_range(info.key.layers)
        read = Read(info.key, offset, lease.part(0, nbytes))
        self._loads += 1
        load, channel = self._loads, self.channels[tier]
        channel.started(load, nbytes, self._clock.now())
        delivered = False
        try:
            async for result in self._tiers[tier].load([read]):
                if result.status is not TransferStatus.OK or result.nbytes != nbytes:
                    raise LoadFailed(result.status.value, str(result.error or result.status.value))
                delivered = True
        except (LoadFailed, TimeoutError):
            raise
        except Exception as error:  # a third party's backend may raise anything: the load failed
            raise LoadFailed("failed", f"{type(error).__name__}: {error}") from error
        finally:
            channel.ended(load, self._clock.now(), delivered=delivered)
        if not delivered:
            raise LoadFailed("missing", "the backend gave no result")

    async def _verify(self, info: ChunkInfo, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, verify, info, info.key.layers, lease.view)
        except IntegrityError as error:
            raise LoadFailed("corrupt", f"corrupt: {error}") from error

    async def _land(self, restore: Restoring, block: int, lease: Lease) -> None:
        """Keep a verified block, or put it in place where its target is known."""
        with restore.lock:
            if restore.closed or block < restore.claim:
                lease.release()
                return
            restore.landed[block] = lease
            has_target = restore.targets is not None
        if has_target:
            loop = asyncio.get_running_loop()
            copy = loop.run_in_executor(self._threads, self.place, restore, block)
            await asyncio.shield(copy)  # a copy that has begun ends; close() waits at the lock
        restore.since = self._clock.now()
        restore.settle()

    # -- from any thread -----------------------------------------------------------------------

    def place(self, restore: Restoring, block: int) -> None:
        """Copy a staged block to its target, unless compute has it by now."""
        with restore.lock:
            lease, target = restore.landed.get(block), restore.target(block)
            if lease is None:
                return
            if target is not None:
                self._memory.write(target, lease.buffer)
                restore.landed[block] = None
            else:
                del restore.landed[block]  # it counts as there only if it is in place
            lease.release()

    def claim(self, restore: Restoring, block: int) -> None:
        """Blocks below ``block`` are compute's from now on: nothing is copied into them."""
        with restore.lock:
            restore.claim = max(restore.claim, block)

    def aim(self, restore: Restoring, first: int, ids: tuple[int, ...]) -> None:
        """Say where blocks from ``first`` on go; what is staged is in place when this returns."""
        with restore.lock:
            restore.targets = (first, ids)
            staged = [block for block, lease in restore.landed.items() if lease is not None]
        for block in staged:
            self.place(restore, block)
        restore.settle()

    def abandon(self) -> None:
        """The event loop is gone: no copy that is still under way may reach the cache."""
        for restore in list(self.restores.values()):
            with restore.lock:
                restore.closed = True

    def progress(self, restore: Restoring) -> Progress:
        """How far it is; from any thread, exact enough for a decision."""
        now, tier = self._clock.now(), self._tier_of(restore)
        seconds, latency = self._speed(tier)
        ahead = self._ahead(restore, tier) * (seconds or 0.0)
        nothing_yet = restore.found is not None and restore.low == restore.found.top
        return Progress(
            low=restore.low,
            waited=now - restore.since,
            block_seconds=seconds,
            first_seconds=ahead + (latency if nothing_yet else 0.0),
            dead=restore.low <= max(restore.stop, restore.claim),
        )

    def _tier_of(self, restore: Restoring) -> str:
        at = restore.stored.get(restore.low - 1) or restore.stored.get(restore.low)
        return at[0] if at else next(iter(self._tiers))

    def _speed(self, tier: str) -> tuple[float | None, float]:
        """Seconds a block in a stream of loads, and what the first one waits more."""
        channel = self.channels[tier]
        if channel.bandwidth is None:
            return None, 0.0
        alone = self._memory.nbytes / channel.bandwidth
        return max(alone, (alone + channel.latency) / channel.depth), channel.latency

    def _ahead(self, restore: Restoring, tier: str) -> int:
        """Blocks of older restores still to come over ``tier``; half where compute helps."""
        blocks = 0
        for other in list(self.restores.values()):
            if other.id < restore.id and other.found is not None and self._tier_of(other) == tier:
                left = max(other.low - max(other.stop, other.claim), 0)
                blocks += left // 2 if other.targets else left
        return blocks

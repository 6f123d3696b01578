"""The way back, behind the requests: whole chunks of KV, sealed with their provenance, into tiers.

``save`` returns at once. One task copies chunks out of the engine, once for all tiers that want
them, as fast as staging memory comes free; each tier's writers store what is ready. What waits in
staging can be read there (:mod:`cacheflow.tiers.staged`). The canonical copy of a chunk wins its
key: it replaces another one and is never replaced (by saves of this process; those of others into a
shared tier are not seen).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.abc import Decoder
from cacheflow.errors import ClosedError
from cacheflow.kv import Stamp, canonical_tokens, exact_tokens
from cacheflow.restore.pace import Pace
from cacheflow.restore.sealing import STAGING_OWNER, Sealer, shard_of
from cacheflow.restore.turns import Turns
from cacheflow.restore.writer import Dropped, Shared, TierWriter
from cacheflow.restore.writes import Save, Saved
from cacheflow.tasks import Pulse, to_the_end
from cacheflow.tiers.traffic import Traffic
from cacheflow.tiers.write_policies import WriteAll
from cacheflow.types import TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
    from enum import StrEnum

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import StagingPool
    from cacheflow.tiers.staged import StagedCopies
    from cacheflow.tiers.write_policies import WritePolicy
    from cacheflow.types import ChunkKey, Observer

__all__ = ["STAGING_OWNER", "Saved", "Saver"]

_log = logging.getLogger(__name__)
_NOBODY: Final = Stamp()
_ASK_SECONDS: Final = 0.05
"""A request that is to be closed waits this long for tiers to say what they have."""


class Saver:
    """Stores the KV of open requests while ``async with`` lasts.

    ``max_bytes``: staging memory for what waits (or None: half of the pool), in equal shares, so
    that a tier that hangs leaves the others theirs. ``policy``: what is worth storing (default:
    everything). ``stamp``: who stores, written into every chunk. ``traffic``: loads to give way to.
    """

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        clock: Clock,
        observer: Observer,
        staged: StagedCopies,
        *,
        deadline: float = 30.0,
        max_bytes: int | None = None,
        policy: WritePolicy | None = None,
        stamp: Stamp = _NOBODY,
        traffic: Traffic | None = None,
    ) -> None:
        self._engine = engine
        self._staged = staged
        self._pulse = Pulse()
        self._turns = Turns()
        self._pace = Pace(_decoding_of(engine))
        self._shard = shard_of(engine)
        traffic = traffic or Traffic()
        traffic.when_quiet(self._pulse.beat)
        shared = Shared(
            self._shard,
            staged,
            self._turns,
            self._pace,
            traffic,
            self._pulse,
            clock,
            observer,
            deadline,
        )
        self._stamp = stamp
        share = (pool.capacity // 2 if max_bytes is None else max_bytes) // max(len(channels), 1)
        self._writers = {
            name: TierWriter(name, backend, shared, share) for name, backend in channels.items()
        }
        self._policy = policy or WriteAll()
        self._saves: OrderedDict[Save, None] = OrderedDict()
        """Those that are not settled, the oldest first."""
        self._sealer = Sealer(engine, pool, self._pace)
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        """A task that copies or writes has ended: nothing may be waited for any more."""

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._spawn(self._capture_all()).add_done_callback(self._over)
        for writer in self._writers.values():
            for _ in range(writer.at_once):
                self._spawn(writer.run()).add_done_callback(self._over)
        self._staged.settle = self._settle
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """What is not stored by now is dropped. I/O in flight keeps its memory until it ends."""
        group, self._group = self._group, None
        self._staged.settle = None
        for task in list(self._tasks):
            task.cancel()
        try:
            if group is not None:
                await to_the_end(group.__aexit__(None, None, None))
        finally:
            for writer in self._writers.values():
                writer.drop([*writer.queue.waiting, *writer.queue.ready], Dropped.CLOSED)
                for save in self._saves:
                    if writer.tier in save.saved:
                        writer.give_up(save, Dropped.CLOSED.value, "CacheFlow was closed")
            self._saves.clear()
            self._pulse.beat()
            self._sealer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        """The saver is closed; or its task was cancelled with all of a loop that ends."""
        self._is_over = True
        self._pulse.beat()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("nothing more is stored: a task of the saver has failed", exc_info=error)

    def save(
        self, request_id: str, keys: Sequence[ChunkKey], stamp: Stamp | None = None
    ) -> dict[str, Saved]:
        """Have the chunks called ``keys`` stored (the leading whole chunks whose KV is complete),
        under ``stamp`` if it is not the saver's own.

        Returns at once what each tier will have done, counted on while it does it. A tier that
        fails loses its copies, not the others'.

        Raises:
            ClosedError: the request is not open, or the saver is not running.
        """
        skipped = self._skipped(keys)
        indices = range(skipped, len(keys))
        saved = self._begin(request_id, keys, dict.fromkeys(self._writers, indices), stamp)
        for each in saved.values():
            each.skipped = skipped
        return saved

    def promote(
        self,
        request_id: str,
        keys: Sequence[ChunkKey],
        chunks: Mapping[str, Sequence[int]],
        stamp: Stamp | None = None,
    ) -> dict[str, Saved]:
        """Have some chunks, by index, stored in some tiers, as :meth:`save` does with all of them.

        What the write policy leaves out is left out.
        """
        skipped = self._skipped(keys)
        return self._begin(
            request_id,
            keys,
            {tier: [i for i in indices if i >= skipped] for tier, indices in chunks.items()},
            stamp,
        )

    def _skipped(self, keys: Sequence[ChunkKey]) -> int:
        if not self._shard.stores:  # another rank holds the same part, and does
            return len(keys)
        return min(self._policy.skipped(len(keys)), len(keys))

    def _begin(
        self,
        request_id: str,
        keys: Sequence[ChunkKey],
        chunks: Mapping[str, Sequence[int]],
        stamp: Stamp | None,
    ) -> dict[str, Saved]:
        if self._group is None or self._is_over:
            raise ClosedError("CacheFlow was closed before this could be saved")
        segments = self._engine.segments(request_id)
        canonical = canonical_tokens(segments, self._engine.grid)
        size = self._engine.layout.chunk_tokens
        exact = exact_tokens(segments, size * len(keys))
        save = Save(
            request_id, keys, segments, canonical // size, exact // size, stamp or self._stamp
        )
        for tier, indices in chunks.items():
            save.saved[tier] = Saved(pending=len(indices))
            if indices:
                save.asking += 1
                self._spawn(self._writers[tier].offer(save, indices))
        if save.asking:
            self._saves[save] = None
        return save.saved

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to store, at most ``timeout`` seconds; returns whether it is.

        What is not stored by then goes on being stored. False at once where nothing is stored any
        more.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._until(lambda: all(save.is_settled for save in self._saves))
        return all(save.is_settled for save in self._saves)

    def is_settled(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether nothing of a prompt with these keys is still to be stored."""
        # Keys are chained: who shares anything shares the first one.
        return all(s.is_settled or tuple(s.keys[:1]) != tuple(keys[:1]) for s in self._saves)

    async def settled(self, keys: Sequence[ChunkKey]) -> None:
        """Wait for that."""
        await self._until(lambda: self.is_settled(keys))

    async def release(self, request_ids: Collection[str], patience: float = 0.0) -> None:
        """These requests are about to be closed: copy what is to be stored of them.

        ``patience``: seconds to wait while tiers make room; what finds no room after that is
        dropped. Without it nothing but copies in memory, and tiers that are just being asked, is
        waited for.
        """
        saves = [save for save in self._saves if save.request_id in request_ids]
        for save in saves:
            save.leaving = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(patience, _ASK_SECONDS)):
                    if patience:
                        await self._until(lambda: all(s.is_captured for s in saves))
                    await self._until(lambda: not any(s.asking for s in saves))
            for save in saves:
                save.last_call = True
            self._pulse.beat()
            await self._until(lambda: not any(save.waiting for save in saves))
        finally:
            for save in saves:
                save.gone = True
                self._drop_waiting(save)

    # -- out of the engine ---------------------------------------------------------------------

    async def _capture_all(self) -> None:
        """Copy out of the engine whatever a tier has room for, until cancelled."""
        while True:
            for save in [save for save in self._saves if save.is_settled]:
                del self._saves[save]
            if (chosen := self._choose()) is None:
                await self._pulse.next()
            else:
                await self._capture(*chosen)

    async def _settle(self, keys: Sequence[ChunkKey]) -> None:
        """Wait until all of ``keys`` that can be staged for the time being are."""

        def is_settled() -> bool:
            roomy = self._roomy()
            # Keys are chained: who shares anything shares the first one.
            return not any(
                not save.gone and (save.asking or next(save.waiting_for(roomy), None) is not None)
                for save in self._saves
                if keys and save.keys[0] == keys[0]
            )

        await self._until(is_settled)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Somebody waits for ``condition``: until it is true, or nobody is left to make it true,
        nothing is held back."""
        if not condition():
            with self._pace.hurry():
                self._pulse.beat()
                await self._pulse.until(lambda: self._is_over or condition())

    def _roomy(self) -> set[str]:
        """Tiers for which one more copy may be kept."""
        nbytes = self._engine.layout.payload_bytes()
        return {name for name, w in self._writers.items() if w.queue.has_room(nbytes)}

    def _choose(self) -> tuple[Save, int] | None:
        """The save and chunk to copy next: of requests about to be closed first."""
        roomy = self._roomy()
        for save in [save for save in self._saves if save.leaving]:
            if save.last_call:
                self._drop_waiting(save, self._writers.keys() - roomy)
            for index in save.waiting_for(roomy):
                return save, index
        for name in roomy:
            for chunk in self._writers[name].queue.waiting:
                return chunk.save, chunk.index
        return None

    async def _capture(self, save: Save, index: int) -> None:
        """One chunk into staging memory, for all tiers that want it and have room."""
        for name, chunk in list(save.waiting[index].items()):
            self._writers[name].keep(chunk)
        if index not in save.waiting:
            return
        copy = self._staged.join(save.keys[index], save.rank(index))
        if copy is None:
            try:
                copy = await self._sealer.copy(save, index)
            except ClosedError:
                save.gone = True
                self._drop_waiting(save)
            except Exception:  # the engine's error is this chunk's: the others go on
                _log.exception("chunk %d of request %s: no copy", index, save.request_id)
                self._drop_chunk(save, index, TransferStatus.FAILED)
            if copy is None:
                if save.last_call:
                    self._drop_chunk(save, index, Dropped.FORGOTTEN)
                return
            self._staged.add(copy)
        for name, chunk in list(save.waiting.get(index, {}).items()):
            queue = self._writers[name].queue
            if queue.has_room(copy.lease.buffer.nbytes):
                queue.attach(chunk, copy)
        self._staged.leave(copy)
        self._pulse.beat()

    def _drop_waiting(self, save: Save, tiers: Collection[str] | None = None) -> None:
        """What waits for staging memory (in ``tiers``, or anywhere) is lost with its request."""
        for name in self._writers if tiers is None else tiers:
            writer = self._writers[name]
            writer.drop([c for c in writer.queue.waiting if c.save is save], Dropped.FORGOTTEN)

    def _drop_chunk(self, save: Save, index: int, why: StrEnum) -> None:
        for name, chunk in list(save.waiting.get(index, {}).items()):
            self._writers[name].drop([chunk], why)


def _decoding_of(engine: Engine) -> Callable[[], bool]:
    """Whether ``engine`` decodes just now; one that cannot tell is taken not to."""
    return (lambda: engine.is_decoding) if isinstance(engine, Decoder) else (lambda: False)

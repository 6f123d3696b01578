"""The disk behind the arena: what was committed is kept there too, and read back when it is wanted.

Objects are written in the background, in the order in which they came, straight out of their slots;
what leaves the arena before its turn is lost and counted. What the disk has is what a store begins
with after a restart. Knows no clients.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import CacheFlowError, IntegrityError
from cacheflow.kv import decode_header, verify
from cacheflow.registry import load_backend
from cacheflow.tiers import Guarded, Tier
from cacheflow.types import Read, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from cacheflow.clock import Clock
    from cacheflow.pool.slots import Arena, Slot
    from cacheflow.settings import TierSettings
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Observer

__all__ = ["Spill"]

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 4
"""Objects written at the same time."""
_CLOSE_SECONDS: Final = 5.0
_DEADLINE: Final = 10.0
"""Seconds for one operation; a disk that is too slow too often is set aside for a while."""


class Spill:
    """``tier`` is the disk. Made by :meth:`open`."""

    def __init__(self, tier: Tier, arena: Arena) -> None:
        self.tier = tier
        self.lost = 0
        """Objects that left the arena before they were written, or could not be."""
        self._arena = arena
        self._waiting: asyncio.Queue[Slot] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        settings: TierSettings,
        arena: Arena,
        clock: Clock,
        observer: Observer,
    ) -> Self:
        """Open the folder and learn what is in it.

        Raises:
            ConfigError: it cannot be used.
            IntegrityError: there is something else.
        """
        kind = await asyncio.to_thread(load_backend, settings.backend)  # reads files
        backend = await kind.open(settings.options)
        name = settings.name
        guarded = Guarded(backend, name, deadline=_DEADLINE, clock=clock, observer=observer)
        spill = cls(await Tier.over(guarded, settings, clock=clock, observer=observer), arena)
        try:
            await spill.tier.settle()
        except BaseException:
            await spill.tier.aclose()
            raise
        spill._writer = asyncio.create_task(spill._write())
        return spill

    @property
    def waiting(self) -> int:
        """Objects that are not written yet."""
        return self._waiting.qsize()

    def put(self, slot: Slot) -> None:
        """Write it when its turn comes."""
        self._waiting.put_nowait(slot)

    def has(self, key: ObjectKey) -> bool:
        """Whether the object is on disk, by the index."""
        return self.tier.catalogue.find(key) is not None

    async def lookup(self, chunks: Sequence[ChunkKey]) -> Mapping[ChunkKey, Sequence[ChunkInfo]]:
        """What is on disk and not in the arena; a disk in trouble has nothing."""
        asked = [chunk for chunk in dict.fromkeys(chunks) if self._is_of_interest(chunk)]
        if not asked:
            return {}
        try:
            found = await self.tier.lookup(asked)
        except CacheFlowError as error:
            _log.warning("spill: lookup failed: %s", error)
            return {}
        return {
            chunk: [info for info in infos if self._arena.find(info.key) is None]
            for chunk, infos in zip(asked, found, strict=True)
        }

    async def read(self, info: ChunkInfo, slot: Slot) -> bool:
        """Fill ``slot`` with the object; False if it cannot be had. A bad one is deleted."""
        try:
            async with aclosing(self.tier.load([Read(info.key, 0, slot.lease.buffer)])) as results:
                async for result in results:
                    if result.status is not TransferStatus.OK:
                        return False
            await asyncio.to_thread(_verify, info, slot.lease.view)
        except IntegrityError as error:
            _log.warning("spill: %r is damaged: %s", info.key, error)
            self.tier.distrust([info.key])
            return False
        except CacheFlowError as error:
            _log.warning("spill: %r cannot be read: %s", info.key, error)
            return False
        return True

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        """Everything on disk that is not in the arena."""
        async with aclosing(self.tier.scan()) as infos:
            async for info in infos:
                if self._arena.find(info.key) is None:
                    yield info

    @property
    def bytes_beyond(self) -> int:
        """Bytes of what is on disk and not in the arena."""
        entries = self.tier.catalogue
        return sum(entry.nbytes for entry in entries if self._arena.find(entry.key) is None)

    async def drain(self, seconds: float) -> None:
        """Write what waits, as far as that can be done in ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._waiting.join()

    async def aclose(self) -> None:
        """Give up what is still to be written."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer], timeout=_CLOSE_SECONDS)
            self._writer = None
        await self.tier.aclose()

    def _is_of_interest(self, chunk: ChunkKey) -> bool:
        return any(self._arena.find(entry.key) is None for entry in self.tier.catalogue.of(chunk))

    async def _write(self) -> None:
        """Versions of one object go one after another: the newest is the one that stays."""
        while True:
            batch = {(slot := await self._waiting.get()).info.key: slot}
            while len(batch) < _AT_ONCE and not self._waiting.empty():
                slot = self._waiting.get_nowait()
                if slot.info.key in batch:
                    self._waiting.put_nowait(slot)
                    self._waiting.task_done()
                    break
                batch[slot.info.key] = slot
            try:
                here = [s for s in batch.values() if self._arena.find(s.info.key) is s]
                self.lost += len(batch) - len(here)
                await self._keep(here)
            finally:
                for _ in batch:
                    self._waiting.task_done()

    async def _keep(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.hold.acquire()
        try:
            results = await self.tier.store([Write(slot.info, slot.parts()) for slot in slots])
            for slot, result in zip(slots, results, strict=True):
                slot.is_kept = result.status is TransferStatus.OK
            unwanted = [slot.info.key for slot in slots if slot.is_deleted]
            if unwanted:
                await self.tier.delete(unwanted)
        except Exception as error:  # whatever the disk does to these, others are to be written
            _log.warning("spill: %d objects cannot be written: %s", len(slots), error)
        finally:
            for slot in slots:
                slot.hold.release()
        self.lost += sum(not slot.is_kept for slot in slots)


def _verify(info: ChunkInfo, data: memoryview) -> None:
    if decode_header(data, expect=info.key) != info:
        raise IntegrityError("another version of it lies there")
    verify(info, info.key.layers, data[info.payload_offset :])

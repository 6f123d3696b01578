"""Second copies that were lost, made anew in the background from what lookups see.

A store that was away, evicted or joined has not all of its share. A lookup asks every store of a
chunk, so it sees who lacks what another one has; that copy is read, verified and written there. One
object at a time, and idle for three times as long as it took: repair takes a quarter of the link at
most. What finds no room in the queue is seen again by the next lookup. Nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from cacheflow.errors import BackendError, CacheFlowError, IntegrityError
from cacheflow.kv import decode_header, verify
from cacheflow.memory import buffer_from
from cacheflow.storage_backends.pool.guard import Guard
from cacheflow.storage_backends.pool.reading import Loading
from cacheflow.storage_backends.pool.writing import Storing
from cacheflow.types import Read, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.storage_backends.pool.looking import Looking
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Buffer, ChunkInfo, ObjectKey

__all__ = ["Repair"]

_log = logging.getLogger(__name__)
_MOST_WAITING: Final = 1024
_MOST_BYTES: Final = 256 << 20
"""Of one object: so much memory a repair takes at most."""
_IDLE: Final = 3.0
"""Seconds of rest for each second of work."""
_ASIDE: Final = 30.0
"""Seconds for which a store that did not take a copy (it is full, or leaving) is offered none."""


class _Hole(NamedTuple):
    """``target`` lacks an object that each of ``sources`` has, the same one."""

    info: ChunkInfo
    sources: tuple[Peer, ...]
    target: Peer


class Repair:
    """Of one client; ``threads`` compute checksums. :meth:`aclose` must follow."""

    def __init__(self, looking: Looking, threads: IoThreads, transfer_seconds: float) -> None:
        self.copied: Counter[str] = Counter()
        """Copies made, by the name of the store that lacked them."""
        self.dropped: Counter[str] = Counter()
        """Copies that could not be made, or found no room in the queue."""
        self._looking = looking
        self._threads = threads
        self._seconds = transfer_seconds
        self._waiting: dict[tuple[ObjectKey, str], _Hole] = {}
        self._aside: dict[str, float] = {}
        """Stores that took none, and until when they are left alone."""
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def lacks(self, target: Peer, info: ChunkInfo, sources: Sequence[Peer]) -> None:
        """A lookup saw a hole."""
        name = (info.key, target.name)
        if self._is_closed or name in self._waiting:
            return
        is_aside = time.monotonic() < self._aside.get(target.name, 0.0)
        if is_aside or len(self._waiting) >= _MOST_WAITING or info.nbytes > _MOST_BYTES:
            self.dropped[target.name] += 1
            return
        self._waiting[name] = _Hole(info, tuple(sources), target)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def forget(self, key: ObjectKey) -> None:
        """It was deleted or replaced here: what is known of its copies is out of date."""
        for name in [name for name in self._waiting if name[0] == key]:
            del self._waiting[name]

    async def aclose(self) -> None:
        """Give up what waits. Idempotent."""
        self._is_closed = True
        self._waiting.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while self._waiting:
            name, hole = next(iter(self._waiting.items()))
            start = time.monotonic()
            try:
                await self._fill(hole)
            except CacheFlowError as error:
                self.dropped[hole.target.name] += 1
                _log.debug("store %s: a copy is not made: %s", hole.target.name, error)
            finally:
                if self._waiting.get(name) is hole:
                    del self._waiting[name]
            if self._waiting:
                await asyncio.sleep(_IDLE * (time.monotonic() - start))

    async def _fill(self, hole: _Hole) -> None:
        """Raises CacheFlowError where no copy could be made."""
        if await self._looking.has(hole.target, hole.info.key):
            return  # another client was quicker
        memory = await asyncio.to_thread(bytearray, hole.info.nbytes)
        buffer = buffer_from(memory)
        await self._read(hole, buffer)
        await asyncio.to_thread(_verify, hole.info, memory)
        if (hole.info.key, hole.target.name) not in self._waiting:
            return  # deleted or replaced here meanwhile
        await self._write(hole, buffer)
        self.copied[hole.target.name] += 1

    async def _read(self, hole: _Hole, buffer: Buffer) -> None:
        guard = Guard((buffer,))
        sources = [peer for peer in hole.sources if peer.is_up]
        reads = [Read(hole.info.key, 0, buffer)]
        loading = Loading(reads, [guard], lambda key: sources, self._seconds)
        try:
            result = await loading.read(0)
        finally:
            await loading.aclose()
            guard.leave()
        if result.status is not TransferStatus.OK:
            raise result.error or BackendError(f"its source is {result.status}", operation="load")

    async def _write(self, hole: _Hole, buffer: Buffer) -> None:
        guard = Guard((buffer,))
        writes = [Write(hole.info, (buffer,))]
        storing = Storing(writes, [guard], lambda key: [hole.target], self._threads, self._seconds)
        try:
            result = await storing.write(0)
        finally:
            await storing.aclose()
            guard.leave()
        if result.status is not TransferStatus.OK:
            if result.status in (TransferStatus.FULL, TransferStatus.REFUSED):
                self._aside[hole.target.name] = time.monotonic() + _ASIDE
            raise result.error or BackendError(f"it is {result.status}", operation="store")
        self._looking.found_at(hole.target, hole.info.key)


def _verify(info: ChunkInfo, data: bytearray) -> None:
    """What is damaged, or another version, is not spread."""
    view = memoryview(data)
    if decode_header(view, expect=info.key) != info:
        raise IntegrityError("another version of it lies there")
    verify(info, info.key.layers, view[info.payload_offset :])

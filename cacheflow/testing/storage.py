"""A store in a dict whose every read can be made to go wrong: for testing what sits on top."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError
from cacheflow.kv import decode_header
from cacheflow.types import Capabilities, Read, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Write

__all__ = ["MemoryBackend"]


class MemoryBackend(StorageBackend):
    """``before_read`` runs before each read's bytes are copied: it may wait, raise or do nothing.

    ``objects`` is the back door: whole objects as bytes, to be altered at will.
    """

    name = "memory"

    def __init__(self) -> None:
        self.capabilities = Capabilities(suggested_depth=4)
        self.objects: dict[ObjectKey, bytearray] = {}
        self.before_read: Callable[[Read], Awaitable[None]] | None = None
        self.before_lookup: Callable[[], Awaitable[None]] | None = None
        self.reads = 0

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        return cls()

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        if self.before_lookup is not None:
            await self.before_lookup()
        asked = set(keys)
        stored = [data for key, data in self.objects.items() if key.chunk in asked]
        infos = [decode_header(memoryview(data)) for data in stored]
        return [[info for info in infos if info.key.chunk == key] for key in keys]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        for read in reads:
            read.buffer.hold.acquire()
        waiting = list(reads)
        try:
            for read in reads:
                result = await self._read(read)
                waiting.remove(read)
                read.buffer.hold.release()
                yield result
        finally:
            for read in waiting:
                read.buffer.hold.release()

    async def _read(self, read: Read) -> TransferResult:
        self.reads += 1
        start = time.monotonic()
        try:
            if self.before_read is not None:
                await self.before_read(read)
        except BackendError as error:
            return TransferResult(read, TransferStatus.FAILED, 0, time.monotonic() - start, error)
        await asyncio.sleep(0)
        data = self.objects.get(read.key)
        if data is None:
            return TransferResult(read, TransferStatus.MISSING, 0, time.monotonic() - start)
        part = data[read.offset : read.offset + read.buffer.nbytes]
        assert read.buffer.view is not None
        read.buffer.view[: len(part)] = part
        ok = len(part) == read.buffer.nbytes
        status = TransferStatus.OK if ok else TransferStatus.SHORT
        return TransferResult(read, status, len(part), time.monotonic() - start)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        results = []
        for write in writes:
            data = bytearray()
            for part in write.parts:
                assert part.view is not None
                data += part.view
            self.objects[write.info.key] = data
            results.append(TransferResult(write, TransferStatus.OK, len(data), 0.0))
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [self.objects.pop(key, None) is not None for key in keys]

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        for data in list(self.objects.values()):
            yield decode_header(memoryview(data))

    async def used_bytes(self) -> int:
        return sum(len(data) for data in self.objects.values())

    async def aclose(self) -> None:
        return

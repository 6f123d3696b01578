"""A tier that stores chunks encoded: what is handed to it raw is compressed on the way in.

Nothing is decoded here: headers say how their chunks are stored, and whoever loads them decodes
after verifying. Encoding runs on a thread of the tier's own, one chunk at a time; the copy that it
makes is as large as the chunk at most and lives until its store has ended.
"""

from __future__ import annotations

import asyncio
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import Stamp, seal, verify
from cacheflow.memory import buffer_from
from cacheflow.types import Codec, ObjectKind, TransferResult, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from cacheflow.types import Buffer, ChunkInfo, ChunkKey, ObjectKey, Read, StorePart

__all__ = ["Encoded"]


class Encoded(StorageBackend):
    """``inner``, with raw chunks stored with ``codec`` and under ``stamp``. Closing it closes
    ``inner``. Chunks that are encoded already are stored as they are."""

    name: ClassVar[str] = "encoded"

    def __init__(self, inner: StorageBackend, codec: Codec, stamp: Stamp) -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, codec=codec)
        self._codec = codec
        self._stamp = stamp
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-encode")

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """There is nothing to open by name: wrap a backend."""
        raise ConfigError("an encoded backend is made by Encoded(inner, codec, stamp)")

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """As ``inner``; the caller's buffers are held until nothing reads them, or the copies that
        were made of them, any more. What is not what its header says is not stored."""
        jobs = [self._begin(write) for write in writes]
        encoded = [(write, await _made(job)) for write, job in zip(writes, jobs, strict=True)]
        sound = [(write, made) for write, made in encoded if isinstance(made, Write)]
        results = await self.inner.store([made for _, made in sound])
        ends = {
            id(write): replace(result, request=write)
            for (write, _), result in zip(sound, results, strict=True)
        }
        for write, made in encoded:
            if isinstance(made, IntegrityError):
                ends[id(write)] = TransferResult(write, TransferStatus.FAILED, 0, 0.0, made)
        return [ends[id(write)] for write in writes]

    def _begin(self, write: Write) -> Future[Write]:
        for part in write.parts:
            part.hold.acquire()
        job = self._encoder.submit(self._encode, write)

        def ended(_: object) -> None:
            for part in write.parts:
                part.hold.release()

        job.add_done_callback(ended)
        return job

    def _encode(self, write: Write) -> Write:
        old, views = write.info, [part.view for part in write.parts if part.view is not None]
        if old.codec is not Codec.RAW or len(views) < len(write.parts):
            return write
        payload = _joined(views)[old.payload_offset :]
        verify(old, old.key.layers, payload)  # or what is wrong would get a checksum that is right
        info, header = seal(
            old.key,
            old.layout,
            payload,
            grid_id=old.grid_id,
            segments=old.segments,
            canonical=old.canonical,
            stamp=replace(self._stamp, model_id=old.model_id, tenant_id=old.tenant_id),
            lossy=old.lossy,
            codec=self._codec_of(old),
            checksum_kind=old.checksum_kind,
            layout_id=old.layout_id,
        )
        stored = payload[: info.nbytes - info.payload_offset]
        # The caller's memory can be written again once the store has ended: it asks this hold.
        hold = write.parts[-1].hold
        return Write(info, (buffer_from(header, hold), buffer_from(stored, hold)))

    def _codec_of(self, info: ChunkInfo) -> Codec:
        """Not what only an engine understands; and nothing may be lost of what recompute begins
        with, which would be of no use then."""
        exact = info.key.kind is ObjectKind.HIDDEN and self._codec.is_lossy
        return self._codec if info.layout_id == "canonical" and not exact else Codec.RAW

    # -- as inner has it -----------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        return await self.inner.lookup(keys)

    async def survey(
        self, keys: Sequence[ChunkKey], wanted: Sequence[int]
    ) -> list[Sequence[ChunkInfo]]:
        return await self.inner.survey(keys, wanted)

    def declines(self, chunk: ChunkKey, start: int, stop: int, cells: int) -> bool:
        return self.inner.declines(chunk, start, stop, cells)

    def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        return self.inner.load(reads)

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.distrust(keys)

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self.inner.register_memory(memory)

    def parts(self) -> Sequence[StorePart]:
        return self.inner.parts()

    def hint(self, keys: Sequence[ChunkKey], priority: float, ttl: float) -> None:
        self.inner.hint(keys, priority, ttl)

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        return self.inner.pin(keys, ttl)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self.inner.delete(keys)

    def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        return self.inner.scan()

    async def used_bytes(self) -> int:
        return await self.inner.used_bytes()

    async def aclose(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await self.inner.aclose()


async def _made(job: Future[Write]) -> Write | IntegrityError:
    try:
        return await asyncio.wrap_future(job)
    except IntegrityError as error:
        return error


def _joined(views: Sequence[memoryview]) -> memoryview:
    """A copy, on a page boundary as the tier's files like it."""
    whole, at = memoryview(mmap.mmap(-1, sum(map(len, views)))), 0
    for view in views:
        whole[at : at + len(view)] = view
        at += len(view)
    return whole

"""A link in front of any backend: bandwidth and latency shared by everything that uses it.

Time is kept by absolute deadlines, so that sustained throughput is exact: a read of ``n`` bytes
that meets an idle link is there after ``latency + n / bandwidth``, one that meets a busy link
queues behind it. The inner backend's own work overlaps with the pacing.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from cacheflow.abc import StorageBackend
from cacheflow.registry import load_backend
from cacheflow.storage_backends.options import Options
from cacheflow.types import TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, TransferResult, Write

__all__ = ["Link", "ThrottledBackend", "ThrottledOptions"]


class Link:
    """A serial pipe in each direction. ``bandwidth`` in bytes a second (0: unlimited).

    Share one object between backends to let them share one link. Loop-owned.
    """

    def __init__(self, bandwidth: float = 0.0, latency: float = 0.0) -> None:
        if bandwidth < 0 or latency < 0:
            raise ValueError("bandwidth and latency cannot be negative")
        self.bandwidth = bandwidth
        self.latency = latency
        self._free_at = {"load": 0.0, "store": 0.0}

    def book(self, nbytes: int, direction: str, now: float) -> float:
        """Reserve the pipe for ``nbytes``; returns when the last of them arrives."""
        start = max(now, self._free_at[direction])
        seconds = nbytes / self.bandwidth if self.bandwidth else 0.0
        self._free_at[direction] = start + seconds
        return start + seconds + self.latency


class ThrottledOptions(Options):
    """Options of the ``throttled`` backend."""

    inner: str
    """Registry name of the backend behind the link."""
    inner_options: dict[str, object] = Field(default_factory=dict)
    bandwidth: float = Field(default=0.0, ge=0.0)
    """Bytes a second in each direction; 0 is unlimited."""
    latency: float = Field(default=0.0, ge=0.0)
    """Seconds added to every read and write."""


class ThrottledBackend(StorageBackend):
    """``inner`` seen through ``link``. Closing it closes ``inner`` only if it opened that itself."""

    name: ClassVar[str] = "throttled"

    def __init__(self, inner: StorageBackend, link: Link, *, owns_inner: bool = False) -> None:
        self.inner = inner
        self.link = link
        self.capabilities = inner.capabilities
        self._owns_inner = owns_inner

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        parsed = ThrottledOptions.parse(cls.name, options)
        inner = await load_backend(parsed.inner).open(parsed.inner_options)
        return cls(inner, Link(parsed.bandwidth, parsed.latency), owns_inner=True)

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        await self._until(self.link.latency + asyncio.get_running_loop().time())
        return await self.inner.lookup(keys)

    async def load(self, reads: Sequence[Read]) -> AsyncIterator[TransferResult]:
        now = asyncio.get_running_loop().time()
        # The whole batch is booked at once, in its order: what is shared is the pipe, not a slot.
        due = {id(read): self.link.book(read.buffer.nbytes, "load", now) for read in reads}
        async with aclosing(self.inner.load(reads)) as results:  # type: ignore[type-var]
            async for result in results:
                if result.status is not TransferStatus.MISSING:
                    await self._until(due[id(result.request)])
                yield result

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        now = asyncio.get_running_loop().time()
        due = now
        for write in writes:
            due = self.link.book(write.nbytes, "store", now)
        results = await self.inner.store(writes)
        await self._until(due)
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self.inner.delete(keys)

    def scan(self) -> AsyncIterator[ChunkInfo]:
        return self.inner.scan()

    async def used_bytes(self) -> int:
        return await self.inner.used_bytes()

    async def aclose(self) -> None:
        if self._owns_inner:
            await self.inner.aclose()

    @staticmethod
    async def _until(when: float) -> None:
        """Sleep until ``when`` on the loop's clock; a deadline that has passed costs nothing."""
        delay = when - asyncio.get_running_loop().time()
        if delay > 0:
            await asyncio.sleep(delay)

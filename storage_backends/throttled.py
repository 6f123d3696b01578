"""A link in front of any backend: bandwidth and latency shared by everything that uses it.

Time is kept by absolute deadlines, so that sustained throughput is exact: ``n`` bytes that meet an
idle link are there after ``latency + n / bandwidth``, those that meet a busy one queue behind what
came before. The inner backend's own work overlaps with the pacing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from pydantic import Field

from cacheflow.abc import StorageBackend
from cacheflow.errors import ClosedError
from cacheflow.registry import load_backend
from cacheflow.storage_backends.options import Options
from cacheflow.types import TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from cacheflow.types import (
        Buffer,
        ChunkInfo,
        ChunkKey,
        ObjectKey,
        Read,
        StorePart,
        TransferResult,
        Write,
    )

__all__ = ["Link", "ThrottledBackend", "ThrottledOptions", "Transfer"]

_TICK: Final = 0.001
"""Resolution of uvloop's timers: what begins within it is taken as begun, at its exact time."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way through one direction of a link."""

    pipe: _Pipe
    nbytes: int
    joined: float
    due: float | None = None
    """When the last byte arrives; None while queued behind others."""
    arrived: Callable[[], None] | None = None
    timer: asyncio.TimerHandle | None = None

    def when_there(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from the event loop once the last byte has arrived."""
        self.arrived = callback
        if self.due is not None:
            self.timer = asyncio.get_running_loop().call_at(self.due, callback)

    def cancel(self) -> None:
        """Leave the queue. What has begun occupies the link to its end, but calls nobody."""
        self.arrived = None
        if self.timer is not None:
            self.timer.cancel()
        elif self.due is None:
            self.pipe.leave(self)


class _Pipe:
    """One direction: serves in the order of arrival."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: deque[Transfer] = deque()
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, nbytes: int) -> Transfer:
        transfer = Transfer(self, nbytes, asyncio.get_running_loop().time())
        self._queue.append(transfer)
        if self._timer is None:
            self._serve()
        return transfer

    def leave(self, transfer: Transfer) -> None:
        if transfer in self._queue:
            self._queue.remove(transfer)

    def _serve(self) -> None:
        """Begin what can begin by now; each begins where the one before ended, to the tick."""
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._queue:
            start = max(self._free_at, self._queue[0].joined)
            if start > loop.time() + _TICK:
                self._timer = loop.call_at(start, self._serve)
                return
            transfer = self._queue.popleft()
            seconds = transfer.nbytes / self._link.bandwidth if self._link.bandwidth else 0.0
            self._free_at = start + seconds
            transfer.due = self._free_at + self._link.latency
            if transfer.arrived is not None:
                transfer.when_there(transfer.arrived)


class Link:
    """A serial pipe in each direction, or one for both (``duplex`` is False), as a disk is.
    ``bandwidth`` in bytes a second (0: unlimited), ``latency`` in seconds.

    Share one object between backends to let them share one link. Belongs to one event loop.
    """

    def __init__(
        self, bandwidth: float = 0.0, latency: float = 0.0, *, duplex: bool = True
    ) -> None:
        if bandwidth < 0 or latency < 0:
            raise ValueError("bandwidth and latency cannot be negative")
        self.bandwidth = bandwidth
        self.latency = latency
        self._down = _Pipe(self)
        self._up = _Pipe(self) if duplex else self._down

    def receive(self, nbytes: int) -> Transfer:
        """Queue ``nbytes`` on the way to us."""
        return self._down.join(nbytes)

    def send(self, nbytes: int) -> Transfer:
        """Queue ``nbytes`` on the way to the store."""
        return self._up.join(nbytes)


class ThrottledOptions(Options):
    """Options of the ``throttled`` backend."""

    inner: str
    """Registry name of the backend behind the link."""
    inner_options: dict[str, object] = Field(default_factory=dict)
    bandwidth: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Bytes a second in each direction; 0 is unlimited."""
    duplex: bool = True
    """False: reads and writes share the bandwidth."""
    latency: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Seconds added to every lookup, read and write."""


class ThrottledBackend(StorageBackend):
    """``inner`` seen through ``link``. Closing it closes ``inner`` only if it opened that."""

    name: ClassVar[str] = "throttled"

    def __init__(self, inner: StorageBackend, link: Link, *, owns_inner: bool = False) -> None:
        self.inner = inner
        self.link = link
        self.capabilities = inner.capabilities
        self._owns_inner = owns_inner
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        parsed = ThrottledOptions.parse(cls.name, options)
        found = await asyncio.to_thread(load_backend, parsed.inner)  # reads files, imports modules
        inner = await found.open(parsed.inner_options)
        link = Link(parsed.bandwidth, parsed.latency, duplex=parsed.duplex)
        return cls(inner, link, owns_inner=True)

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        self._check()
        if self.link.latency:
            await asyncio.sleep(self.link.latency)
        return await self.inner.lookup(keys)

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._check()
        for read in reads:  # before the first await; the inner backend starts in a task, later
            read.buffer.hold.acquire()
        try:
            async with aclosing(self._load(reads)) as results:
                async for result in results:
                    yield result
        finally:
            for read in reads:
                read.buffer.hold.release()

    async def _load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        start = asyncio.get_running_loop().time()
        transfers: defaultdict[int, list[Transfer]] = defaultdict(list)
        for read in reads:
            transfers[id(read)].append(self.link.receive(read.buffer.nbytes))
        arrivals: asyncio.Queue[TransferResult | None] = asyncio.Queue()
        underway: list[Transfer] = []
        pump = asyncio.create_task(self._pump(reads, transfers, arrivals, underway))
        pump.add_done_callback(lambda _: arrivals.put_nowait(None))
        handed = 0
        try:
            while not pump.done() or handed < pump.result():
                result = await arrivals.get()
                if result is not None:
                    handed += 1
                    seconds = asyncio.get_running_loop().time() - start
                    yield replace(result, seconds=seconds)
        finally:
            pump.cancel()
            for transfer in (*underway, *(each for some in transfers.values() for each in some)):
                transfer.cancel()
            await asyncio.wait([pump])
            if not pump.cancelled():
                pump.exception()  # seen by whoever read on; of no interest to one who left

    async def _pump(
        self,
        reads: Sequence[Read],
        transfers: Mapping[int, list[Transfer]],
        arrivals: asyncio.Queue[TransferResult | None],
        underway: list[Transfer],
    ) -> int:
        """Take the inner results as they end, and put each in ``arrivals`` when it is due."""
        count = 0
        async with aclosing(self.inner.load(reads)) as results:
            async for result in results:
                count += 1
                transfer = transfers[id(result.request)].pop(0)
                if result.status is TransferStatus.MISSING:
                    transfer.cancel()
                    arrivals.put_nowait(result)
                else:
                    underway.append(transfer)
                    transfer.when_there(partial(arrivals.put_nowait, result))
        return count

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        loop = asyncio.get_running_loop()
        start, there = loop.time(), asyncio.Event()
        transfers = [self.link.send(write.nbytes) for write in writes]
        try:
            results = await self.inner.store(writes)
            if transfers:
                transfers[-1].when_there(there.set)
                await there.wait()
        finally:
            for transfer in transfers:
                transfer.cancel()
        return [replace(result, seconds=loop.time() - start) for result in results]

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        return await self.inner.delete(keys)

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        async for info in self.inner.scan():
            yield info

    async def used_bytes(self) -> int:
        self._check()
        return await self.inner.used_bytes()

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self.inner.register_memory(memory)

    def parts(self) -> Sequence[StorePart]:
        return self.inner.parts()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if self._owns_inner:
                await self.inner.aclose()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the throttled tier is closed")

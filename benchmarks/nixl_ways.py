"""Three ways to read the objects of one store over NIXL: bare, through a link, through the pool.

All into memory of one kind, out of the same slots, four at a time. Knows no clock and no figures.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Final, Self

from bench_pool import OBJECTS

from cacheflow.kv import format_name
from cacheflow.memory import StagingPool
from cacheflow.pool import Piece, messages
from cacheflow.storage_backends.nixl.agent import UcxAgent
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.storage_backends.pool.channel import Channel
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import MemoryKind, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from cacheflow.storage_backends.nixl import NixlTransport
    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.types import ChunkInfo

__all__ = ["DEPTH", "SIZE", "Asked", "Bare", "Linked", "Pooled", "Reader", "opened"]

SIZE: Final = 4 << 20
DEPTH: Final = 4
LEASE_SECONDS: Final = 600
"""Longer than a run: those who read without the directory need not renew anything."""


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[StoreProcess, PoolBackend]]:
    """A store, and a client of it."""
    options = {"arena": (OBJECTS + 4) * (SIZE + (1 << 16)), "lease_seconds": LEASE_SECONDS}
    process = StoreProcess(folder / "log", transports='["nixl"]', **options)
    await asyncio.to_thread(process.start)
    try:
        client = {"peers": [process.address], "transports": ["nixl"]}
        backend = await PoolBackend.open(client)
        try:
            yield process, backend
        finally:
            await backend.aclose()
    finally:
        await asyncio.to_thread(process.kill)


class Reader:
    """A connection of its own to the store, with leases on all objects while it wants them."""

    def __init__(self, channel: Channel, answer: bytes, infos: Sequence[ChunkInfo]) -> None:
        self.answer = answer
        self.offsets: list[int] = []
        """Of the payloads, from the start of the arena."""
        self._channel = channel
        self._infos = infos

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int, infos: Sequence[ChunkInfo]) -> AsyncIterator[Self]:
        """Without leases, to begin with."""
        channel = await Channel.connect("bench", ("127.0.0.1", port), None)
        try:
            hello = messages.Hello(client="bench", token=b"", offers=(("nixl", b""),))
            reply = await channel.ask(hello, messages.HelloReply, 5.0)
            yield cls(channel, reply.answer, infos)
        finally:
            await channel.aclose()

    @asynccontextmanager
    async def leasing(self) -> AsyncIterator[None]:
        """All objects stay where ``offsets`` says."""
        request = messages.Lease(names=tuple(format_name(info.key) for info in self._infos))
        reply = await self._channel.ask(request, messages.LeaseReply, 5.0)
        slots = [slot for slot in reply.slots if slot is not None]
        self.offsets = [
            slot[0] + info.payload_offset for slot, info in zip(slots, self._infos, strict=True)
        ]
        try:
            yield
        finally:
            generations = tuple(slot[2] for slot in slots)
            self._channel.tell(messages.Release(generations=generations, looked_up=False))


class Bare:
    """Transfers of an agent of its own, on whatever thread :meth:`run` is called."""

    def __init__(self, reader: Reader, cores: set[int]) -> None:
        """``cores``: on which it may run."""
        self._reader = reader
        self._cores = cores
        self._hello = Hello.decode(reader.answer)
        self.agent = UcxAgent(f"bare-{time.time_ns()}")
        self._pool = StagingPool(DEPTH * SIZE)
        self.agent.register(self._pool.address, self._pool.capacity, self._pool.kind)
        self._peer = self.agent.add(self._hello.metadata)

    def run(self, count: int) -> None:
        """Read ``count`` times."""
        self.stay()
        agent, begun = self.agent, min(DEPTH, count)
        flying = [(slot, self.begin(slot, slot)) for slot in range(begun)]
        while flying:
            still = []
            for slot, transfer in flying:
                if not agent.has_ended(transfer):
                    still.append((slot, transfer))
                    continue
                agent.release(transfer)
                if begun < count:
                    still.append((slot, self.begin(slot, begun)))
                    begun += 1
            flying = still

    def stay(self) -> None:
        """Keep this thread where it may run."""
        os.sched_setaffinity(0, self._cores)

    def first(self) -> bytes:
        """What was read into the first of the places."""
        return bytes(self._pool.view[:SIZE])

    def begin(self, slot: int, number: int) -> object:
        """Object ``number`` into one of the places."""
        ours = [(self._pool.address + slot * SIZE, SIZE)]
        theirs = [(self._hello.address + self._reader.offsets[number % OBJECTS], SIZE)]
        return self.agent.begin("READ", self._peer, ours, MemoryKind.PAGEABLE, theirs)


class Asked:
    """The least that an asyncio program can do: a thread with the agent of a :class:`Bare`, tasks
    that ask it for one read at a time, futures that it resolves with ``call_soon_threadsafe``."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._orders: SimpleQueue[tuple[int, int, asyncio.Future[None]] | None] = SimpleQueue()

    async def run(self, count: int) -> None:
        """Read ``count`` times."""
        loop, numbers = asyncio.get_running_loop(), iter(range(count))
        thread = Thread(target=self._serve, args=(loop,))
        thread.start()

        async def one(slot: int) -> None:
            for number in numbers:
                done = loop.create_future()
                self._orders.put((slot, number, done))
                await done

        await asyncio.gather(*map(one, range(DEPTH)))
        self._orders.put(None)
        await asyncio.to_thread(thread.join)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._bare.stay()
        flying: list[tuple[object, asyncio.Future[None]]] = []
        while True:
            while not (flying and self._orders.empty()):
                if (order := self._orders.get()) is None:
                    return
                slot, number, done = order
                flying.append((self._bare.begin(slot, number), done))
            for transfer, done in list(flying):
                if self._bare.agent.has_ended(transfer):
                    self._bare.agent.release(transfer)
                    flying.remove((transfer, done))
                    loop.call_soon_threadsafe(done.set_result, None)


class Linked:
    """The same transfers through a link, from as many tasks, into registered staging memory."""

    def __init__(self, reader: Reader, transport: NixlTransport, link: NixlLink) -> None:
        self._reader = reader
        self._link = link
        self._pool = StagingPool(DEPTH * SIZE)
        transport.register_memory(self._pool.arena)

    async def run(self, count: int) -> None:
        """Read ``count`` times."""
        numbers = iter(range(count))

        async def one() -> None:
            with await self._pool.lease(SIZE) as lease:
                for number in numbers:
                    offset = self._reader.offsets[number % OBJECTS]
                    await self._link.read([Piece(offset, 0, lease.buffer)], deadline=60)

        async with asyncio.TaskGroup() as group:
            for _ in range(DEPTH):
                group.create_task(one())

    def first(self) -> bytes:
        """What was read into the first of the places."""
        return bytes(self._pool.view[:SIZE])


class Pooled:
    """Reads of 4 MiB through the pool backend, into the same kind of memory."""

    def __init__(self, backend: PoolBackend, infos: Sequence[ChunkInfo]) -> None:
        self._backend = backend
        self._infos = infos
        self._pool = StagingPool(DEPTH * SIZE)
        backend.register_memory(self._pool.arena)

    async def run(self, count: int) -> None:
        """Look all objects up once, then read ``count`` times."""
        assert all(await self._backend.lookup([info.key.chunk for info in self._infos]))
        numbers = iter(range(count))

        async def one() -> None:
            with await self._pool.lease(SIZE) as lease:
                for number in numbers:
                    info = self._infos[number % OBJECTS]
                    read = Read(info.key, info.payload_offset, lease.buffer)
                    async for result in self._backend.load([read]):
                        assert result.status is TransferStatus.OK, result

        async with asyncio.TaskGroup() as group:
            for _ in range(DEPTH):
                group.create_task(one())

    def first(self) -> bytes:
        """What was read into the first of the places."""
        return bytes(self._pool.view[:SIZE])

    def forget(self) -> None:
        """Give the leases of lookups back."""
        for peer in self._backend.members.up:
            for info in self._infos:
                peer.places.forget(info.key)

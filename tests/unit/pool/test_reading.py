"""Loads from a store whose slots are held by leases alone, as over RDMA: nothing there checks who
reads, so a lease must outlast the transfer and a place its connection."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from cacheflow.memory import InFlight
from cacheflow.storage_backends.pool.guard import Guard
from cacheflow.storage_backends.pool.reading import Loading
from cacheflow.storage_backends.pool.tcp import TcpLink
from cacheflow.testing.objects import aligned_buffer, load_one, make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.types import Read, TransferStatus
from tests.unit.pool.storing import client, serving
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.pool import Piece
    from cacheflow.storage_backends.pool import PoolBackend


class Gate:
    """Where transfers wait, with their buffers held."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()


@contextmanager
def gated() -> Iterator[Gate]:
    read, gate = TcpLink.read, Gate()

    async def slow(self: TcpLink, pieces: Sequence[Piece], *, deadline: float) -> None:
        pieces[0].buffer.hold.acquire()
        try:
            gate.reached.set()
            await gate.opened.wait()
            await read(self, pieces, deadline=deadline)
        finally:
            pieces[0].buffer.hold.release()

    with mock.patch.object(TcpLink, "read", slow):
        yield gate


async def heard(backend: PoolBackend) -> None:
    """The store has heard what it was told before."""
    await backend.used_bytes()


async def test_what_is_being_read_stays_leased_though_it_is_replaced_here() -> None:
    """A client stores an object anew while it reads the old one: the old slot is kept until the
    read has ended, which gets the old bytes, and is given back then."""
    old, new = make_object(1), make_object(1, version=1)
    async with serving() as server, client(server) as backend:
        await store_all(backend, old)
        await backend.lookup([old.key.chunk])
        with gated() as gate:
            reading = asyncio.create_task(load_one(backend, old.key, 0, len(old.data)))
            await gate.reached.wait()
            await store_all(backend, new)
            await heard(backend)
            assert server.directory.grants.leases == 1
            gate.opened.set()
            result, data = await reading
        assert result.status is TransferStatus.OK
        assert data == old.data
        await until(lambda: server.directory.grants.leases == 0)


async def test_a_lease_outlasts_a_reader_who_left() -> None:
    """The load was given up; what it began goes on, and its slot is kept for as long."""
    old, new = make_object(1), make_object(1, version=1)
    async with serving() as server, client(server) as backend:
        await store_all(backend, old)
        await backend.lookup([old.key.chunk])
        hold, [peer] = InFlight(), backend.members.up
        place = peer.places.find(old.key)
        assert place is not None
        guard = Guard((aligned_buffer(8, hold),))
        place.readers.append(guard)
        guard.acquire()
        guard.leave()
        await backend.lookup([old.key.chunk])  # renewed: the reader is still one of its readers
        await store_all(backend, new)
        await heard(backend)
        assert server.directory.grants.leases == 1
        assert hold.in_flight == 1
        guard.release()
        assert hold.in_flight == 0
        await until(lambda: server.directory.grants.leases == 0)


async def test_places_of_a_connection_that_is_over_are_asked_for_again() -> None:
    """Two reads were leased together; before the second one's turn the connection was made anew.
    Where its bytes lie now only a new lease says."""
    objects = [make_object(1), make_object(2)]
    asked: list[Any] = []
    lease = Loading._lease

    async def counted(self: Loading, peer: Any, group: list[int]) -> Any:
        asked.append(group)
        return await lease(self, peer, group)

    async with serving() as server, client(server) as backend:
        await store_all(backend, *objects)
        [peer] = backend.members.up
        reads = [Read(each.key, 0, aligned_buffer(len(each.data))) for each in objects]
        guards = [Guard((read.buffer,)) for read in reads]
        loading = Loading(reads, guards, backend.looking.route, 5.0)
        with mock.patch.object(Loading, "_lease", counted):
            first = await loading.read(0)
            link = peer.link
            assert peer._channel is not None
            peer._channel.close()
            await until(lambda: peer.is_up and peer.link is not link)
            second = await loading.read(1)
        await loading.aclose()
        for guard in guards:
            guard.leave()
        assert [first.status, second.status] == 2 * [TransferStatus.OK]
        assert asked == [[0, 1], [1]]
        for read, each in zip(reads, objects, strict=True):
            assert bytes(read.buffer.view or b"") == each.data
        await until(lambda: server.directory.grants.leases == 0)

"""Second copies that were lost: made anew by whoever looks them up, bounded, counted, verified."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from cacheflow.pool import StoreSettings, messages, running
from cacheflow.storage_backends.pool import PoolBackend, repair
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.types import TransferStatus
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.pool import StoreServer
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.testing.objects import StoredObject

OBJECTS: Final = [make_object(number) for number in range(6)]
SIZE: Final = OBJECTS[0].info.nbytes


@asynccontextmanager
async def two_stores(**settings: Any) -> AsyncIterator[tuple[StoreServer, StoreServer]]:
    """Each with room for everything, unless ``settings`` of the second say otherwise."""
    fixed = {"port": 0, "data_port": 0, "transports": ("tcp",), "arena": 16 * SIZE}
    async with (
        running(StoreSettings(**fixed)) as first,
        running(StoreSettings(**fixed | settings)) as second,
    ):
        yield first, second


@asynccontextmanager
async def client(*servers: StoreServer) -> AsyncIterator[PoolBackend]:
    peers = [f"localhost:{server.port}" for server in servers]
    options = {"peers": peers, "transports": ["tcp"], "replicas": 2}
    backend = await PoolBackend.open(options)
    try:
        yield backend
    finally:
        await backend.aclose()


def peer_of(backend: PoolBackend, server: StoreServer) -> Peer:
    return backend.members.peers[f"localhost:{server.port}"]


def has(server: StoreServer, stored: StoredObject) -> bool:
    return server.directory.arena.find(stored.key) is not None


async def lose(server: StoreServer, *objects: StoredObject) -> None:
    """The store forgets them, as one does that was started again."""
    await server.directory.delete([each.key for each in objects])


async def look_up(backend: PoolBackend, objects: Sequence[StoredObject]) -> None:
    found = await backend.lookup([each.key.chunk for each in objects])
    assert found == [[each.info] for each in objects]


async def idle(backend: PoolBackend) -> None:
    """Until nothing waits to be repaired."""
    await until(lambda: not backend.repair._waiting)


async def test_a_lookup_brings_lost_copies_back() -> None:
    """What one of two stores has lost it has again after a lookup that saw it, and only that; the
    copies are the objects, and each is counted at the store that got it."""
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS)
        await look_up(backend, OBJECTS)
        assert not backend.repair._waiting
        await lose(first, *OBJECTS[:2])
        await lose(second, *OBJECTS[2:4])
        await look_up(backend, OBJECTS[1:])
        await idle(backend)
        assert [has(first, each) for each in OBJECTS] == [False] + 5 * [True]
        assert [has(second, each) for each in OBJECTS] == 6 * [True]
        assert [(part.repaired, part.not_repaired) for part in backend.parts()] == [(1, 0), (2, 0)]
        async with client(first) as other:
            await look_up(other, OBJECTS[1:])
        async with client(second) as other:
            await look_up(other, OBJECTS)


async def test_many_holes_are_bounded() -> None:
    """So many wait at most, the others are counted; one copy is made at a time; and a hole that
    is seen twice is filled once."""
    most = 0
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS)
        await lose(second, *OBJECTS)
        fill, running_now = repair.Repair._fill, 0

        async def watched(self: repair.Repair, hole: Any) -> None:
            nonlocal most, running_now
            running_now += 1
            most = max(most, running_now)
            await fill(self, hole)
            running_now -= 1

        with (
            mock.patch.object(repair, "_MOST_WAITING", 3),
            mock.patch.object(repair.Repair, "_fill", watched),
        ):
            await look_up(backend, OBJECTS)
            await look_up(backend, OBJECTS)
            await idle(backend)
        lacking = peer_of(backend, second).name
        assert backend.repair.copied[lacking] == 3
        assert backend.repair.dropped[lacking] == 6  # three of them, twice
        assert sum(has(second, each) for each in OBJECTS) == 3
        assert most == 1


async def test_damage_is_not_spread() -> None:
    """A copy whose bytes are not what its header says stays the only one; it is counted."""
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS[:2])
        await lose(second, *OBJECTS[:2])
        slot = first.directory.arena.find(OBJECTS[0].key)
        assert slot is not None
        slot.lease.view[SIZE - 1] ^= 1
        await look_up(backend, OBJECTS[:2])
        await idle(backend)
        assert [has(second, each) for each in OBJECTS[:2]] == [False, True]
        assert backend.repair.dropped[peer_of(backend, second).name] == 1


async def test_what_is_deleted_meanwhile_stays_deleted() -> None:
    """A delete that comes between a repair's read and its write wins."""
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS[:2])
        await lose(second, *OBJECTS[:2])
        read, began, go = repair.Repair._read, asyncio.Event(), asyncio.Event()

        async def held(self: repair.Repair, *args: Any) -> None:
            await read(self, *args)
            began.set()
            await go.wait()

        with mock.patch.object(repair.Repair, "_read", held):
            await look_up(backend, OBJECTS[:1])
            await began.wait()
            assert await backend.delete([OBJECTS[0].key]) == [True]
            go.set()
            await look_up(backend, OBJECTS[1:2])
            await until(lambda: has(second, OBJECTS[1]))
        assert not has(first, OBJECTS[0])
        assert not has(second, OBJECTS[0])


async def test_a_store_that_takes_none_is_left_alone() -> None:
    """One that is full or leaving refuses one copy; the next holes cost it, and the link, nothing
    for a while."""
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS)
        await lose(second, *OBJECTS)
        second.directory.is_draining = True
        await look_up(backend, OBJECTS[:1])
        await idle(backend)
        lacking = peer_of(backend, second).name
        with mock.patch.object(repair.Repair, "_fill", side_effect=AssertionError):
            await look_up(backend, OBJECTS)
        assert not backend.repair._waiting
        assert backend.repair.dropped[lacking] == 7
        second.directory.is_draining = False
        backend.repair._aside.clear()
        await look_up(backend, OBJECTS)
        await until(lambda: all(has(second, each) for each in OBJECTS))


async def test_another_client_was_quicker() -> None:
    """A copy that is there by the time its turn comes is not made again."""
    async with two_stores() as (first, second), client(first, second) as backend:
        await store_all(backend, *OBJECTS[:1])
        await lose(second, OBJECTS[0])
        has_it, stored = backend.looking.has, asyncio.Event()

        async def later(*args: Any) -> bool:
            await stored.wait()
            return await has_it(*args)

        with (
            mock.patch.object(backend.looking, "has", later),
            mock.patch.object(backend.repair, "_read", side_effect=AssertionError),
        ):
            await look_up(backend, OBJECTS[:1])
            async with client(second) as other:
                await store_all(other, OBJECTS[0])
            stored.set()
            await idle(backend)
        assert not backend.repair.dropped
        assert not backend.repair.copied


async def test_closing_ends_a_repair() -> None:
    """A client that closes in the middle of a repair leaves no slot behind at the store."""
    async with two_stores() as (first, second):
        async with client(first, second) as backend:
            await store_all(backend, *OBJECTS)
            await lose(second, *OBJECTS)
            writing = asyncio.Event()
            peer = peer_of(backend, second)
            ask = peer.ask

            async def held(request: messages.Message, *args: Any, **options: Any) -> Any:
                if isinstance(request, messages.Commit):
                    writing.set()
                    await asyncio.Event().wait()
                return await ask(request, *args, **options)

            with mock.patch.object(peer, "ask", held):
                await look_up(backend, OBJECTS)
                async with asyncio.timeout(20):
                    await writing.wait()
                await backend.aclose()
        await until(lambda: second.directory.grants.uncommitted_bytes == 0)
        assert not any(has(second, each) for each in OBJECTS)
        async with client(first, second) as again:
            [result] = await again.store([OBJECTS[0].write()])
            assert result.status is TransferStatus.OK

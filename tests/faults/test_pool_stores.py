"""The pool when stores die, hang, come back, join and leave; over tcp, on real processes."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.testing.etcd_server import find_etcd, running_etcd
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.testing.storage_harness import load_all
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import TransferResult

LIMIT: Final = 30.0
"""Seconds within which something must happen."""
OBJECTS: Final = [make_object(number) for number in range(24)]
CLIENTS: Final = 200 if os.environ.get("CACHEFLOW_FULL") == "1" else 20
QUICK: Final = {"request_seconds": 0.4, "transfer_seconds": 1.5, "connect_seconds": 0.5}


@pytest.fixture(scope="module")
def spill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the store's disk."""
    return tmp_path_factory.mktemp("store") / "spill"


@pytest.fixture(scope="module")
def store(spill: Path) -> Iterator[StoreProcess]:
    """A store for several tests: whoever ends it starts it again."""
    with StoreProcess(spill.parent / "log", arena="2MiB", spill=spill) as store:
        yield store


@asynccontextmanager
async def opened(*stores: StoreProcess, **options: Any) -> AsyncIterator[PoolBackend]:
    where = {} if "etcd" in options else {"peers": [store.address for store in stores]}
    backend = await PoolBackend.open({**where, "transports": ["tcp"], **QUICK, **options})
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def started(*stores: StoreProcess) -> AsyncIterator[None]:
    """The stores run; whatever becomes of them, they are ended."""
    try:
        await asyncio.gather(*(asyncio.to_thread(store.start) for store in stores))
        yield
    finally:
        for store in stores:
            await asyncio.to_thread(store.kill)


@asynccontextmanager
async def filled(store: StoreProcess) -> AsyncIterator[PoolBackend]:
    """A client of a store that has all objects and nothing else."""
    async with opened(store) as backend:
        await backend.delete([info.key async for info in backend.scan()])
        await fill(backend)
        yield backend


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Ask a store again and again: nothing in this process could tell."""
    async with asyncio.timeout(LIMIT):
        while not await reached():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def fill(backend: PoolBackend) -> None:
    """Store all objects. Clients here are so impatient that they may give up a good store once on a
    busy machine."""

    async def stored() -> bool:
        results = await backend.store([each.write() for each in OBJECTS])
        return {result.status for result in results} == {TransferStatus.OK}

    await until(stored)


class Load:
    """Somebody who reads all objects over and over; every byte that is said to be there is."""

    def __init__(self, backend: PoolBackend) -> None:
        self.results: list[TransferResult] = []
        self.longest = 0.0
        self._backend = backend

    async def round(self, objects: list[StoredObject]) -> list[TransferStatus]:
        """One read of each; a lookup that no store answers is no error to a request."""
        start = time.monotonic()
        found = await self._backend.lookup([each.key.chunk for each in objects])
        assert all(info in [each.info for each in objects] for infos in found for info in infos)
        reads = [Read(each.key, 0, aligned_buffer(len(each.data))) for each in objects]
        results = await load_all(self._backend, reads)
        self.longest = max(self.longest, time.monotonic() - start)
        self.results += results
        data = {id(read): each.data for read, each in zip(reads, objects, strict=True)}
        for result in results:
            assert isinstance(result.request, Read)
            if result.status is TransferStatus.OK:
                assert bytes(result.request.buffer.view or b"") == data[id(result.request)]
            else:
                assert result.status in (TransferStatus.MISSING, TransferStatus.LATE)
        return [result.status for result in results]

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.round(OBJECTS)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def under_load(backend: PoolBackend) -> AsyncIterator[Load]:
    """Somebody reads all the while; no round of his took long."""
    load, stop = Load(backend), asyncio.Event()
    running = asyncio.create_task(load.run(stop))
    try:
        yield load
    finally:
        stop.set()
        await running
    assert load.longest < 10.0


async def all_there(backend: PoolBackend) -> bool:
    return set(await Load(backend).round(OBJECTS)) == {TransferStatus.OK}


async def none_there(backend: PoolBackend) -> bool:
    return TransferStatus.OK not in await Load(backend).round(OBJECTS)


async def test_a_killed_store_is_a_miss_and_comes_back(store: StoreProcess, spill: Path) -> None:
    """kill -9 under load: reads end soon as misses, no byte is wrong; started again on its disk the
    store is used again, with what it had, by the client that was there all the time."""
    async with filled(store) as backend, under_load(backend):
        await until(lambda: on_disk(spill, len(OBJECTS)))
        await asyncio.to_thread(store.kill)
        await until(lambda: none_there(backend))
        [refused] = await backend.store([OBJECTS[0].write()])
        assert refused.status in (TransferStatus.REFUSED, TransferStatus.FAILED)
        await asyncio.to_thread(store.start)
        await until(lambda: all_there(backend))


async def on_disk(spill: Path, count: int) -> bool:
    def files() -> int:
        return sum(path.is_file() for path in (spill / "objects").rglob("*"))

    return await asyncio.to_thread(files) == count


async def test_a_stopped_store_is_a_miss_until_it_goes_on(store: StoreProcess) -> None:
    """SIGSTOP under load: nothing waits longer than its deadlines, then nobody waits at all; after
    SIGCONT the store is used again."""
    async with filled(store) as backend, under_load(backend):
        await asyncio.to_thread(store.freeze)
        await until(lambda: none_there(backend))
        start = time.monotonic()
        assert await none_there(backend)
        assert time.monotonic() - start < 0.2
        store.thaw()
        await until(lambda: all_there(backend))


async def test_a_drained_store_finishes_and_keeps_what_it_has(
    store: StoreProcess, spill: Path
) -> None:
    """SIGTERM: the store writes everything to its disk and ends with status 0."""
    async with filled(store) as backend:
        assert await asyncio.to_thread(store.stop) == 0
        assert await on_disk(spill, len(OBJECTS))
        await asyncio.to_thread(store.start)
        await until(lambda: all_there(backend))
        found = [info async for info in backend.scan()]
        assert {info.key for info in found} == {each.key for each in OBJECTS}
        assert await backend.used_bytes() == sum(each.info.nbytes for each in OBJECTS)


async def test_a_store_drains_under_load(tmp_path: Path) -> None:
    """SIGTERM with requests coming all the while: they get no error, their misses let the store
    end long before its time is over, and the other store goes on."""
    options = {"arena": "2MiB", "lease_seconds": 1, "drain_seconds": 600}
    stores = [StoreProcess(tmp_path / f"log{at}", **options) for at in range(2)]
    async with started(*stores), opened(*stores) as backend:
        await fill(backend)
        await until(lambda: all_there(backend))
        async with under_load(backend) as load:
            assert await asyncio.to_thread(stores[0].stop) == 0
            before = len(load.results)
            await until(lambda: later(load, before + 2 * len(OBJECTS)))
        statuses = [result.status for result in load.results[before:]]
        assert TransferStatus.OK in statuses
        await asyncio.to_thread(stores[0].start)
        await fill(backend)
        await until(lambda: all_there(backend))


async def later(load: Load, results: int) -> bool:
    """So many reads have ended."""
    return len(load.results) >= results


async def test_many_clients_come_back_at_once(tmp_path: Path) -> None:
    """A store is killed and started again: all of its clients greet it in the same moment, each is
    served, and none sees an error."""
    store = StoreProcess(tmp_path / "log", arena="2MiB", spill=tmp_path / "spill")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(started(store))
        clients = [await stack.enter_async_context(opened(store)) for _ in range(CLIENTS)]
        await fill(clients[0])
        await until(lambda: on_disk(tmp_path / "spill", len(OBJECTS)))
        await asyncio.to_thread(store.kill)
        await asyncio.to_thread(store.start)
        await asyncio.gather(*(until(partial(all_there, client)) for client in clients))


async def test_a_store_that_lost_everything_gets_its_copies_back(tmp_path: Path) -> None:
    """One of two stores that have everything is killed under load and comes back empty: reads go
    on all the time, and it has its copies again without anybody storing them."""
    stores = [StoreProcess(tmp_path / f"log{number}", arena="2MiB") for number in range(2)]
    async with (
        started(*stores),
        opened(*stores, replicas=2, request_seconds=3.0, transfer_seconds=4.0) as backend,
        under_load(backend) as load,
    ):
        await fill(backend)
        await until(lambda: all_there(backend))
        read = len(load.results)
        await asyncio.to_thread(stores[1].kill)
        await asyncio.to_thread(stores[1].start)
        async with opened(stores[1]) as other:  # it knows no other store: it repairs none
            await until(lambda: all_there(other))
        assert all(result.status is TransferStatus.OK for result in load.results[read:])
        assert sum(part.repaired for part in backend.parts()) > 0


@pytest.mark.skipif(find_etcd() is None, reason="no etcd here: apt-get install etcd-server")
async def test_a_store_joins_and_one_dies_under_load(tmp_path: Path) -> None:
    """Stores found through etcd: a third one joins and one of the first two is killed while
    requests run. No error reaches a request, what belongs to a store that stays is found all the
    time, and what is stored afterwards is found on the two that are left."""
    async with AsyncExitStack() as stack:
        running_one = running_etcd(tmp_path)
        etcd = await asyncio.to_thread(running_one.__enter__)
        stack.push_async_callback(asyncio.to_thread, running_one.__exit__, None, None, None)
        stores = [StoreProcess(tmp_path / f"log{n}", arena="2MiB", etcd=etcd) for n in range(3)]
        for store in stores:
            store.options |= {"advertise": store.address, "etcd_ttl": 1}
            stack.push_async_callback(asyncio.to_thread, store.kill)
        await stack.enter_async_context(started(*stores[:2]))
        async with opened(etcd=etcd, discovery_seconds=0.1) as backend:
            await until(lambda: peers_are(backend, 2))
            await fill(backend)
            homes = {each.key: home(backend, each) for each in OBJECTS}
            async with under_load(backend) as load:
                await asyncio.to_thread(stores[2].start)
                await until(lambda: peers_are(backend, 3))
                stay = [each for each in OBJECTS if homes[each.key] == stores[0].address]
                moved = [each for each in stay if home(backend, each) != stores[0].address]
                assert all(home(backend, each) == stores[2].address for each in moved)
                kept = [each for each in stay if each not in moved]
                assert kept

                async def all_kept() -> bool:
                    return set(await load.round(kept)) == {TransferStatus.OK}

                await until(all_kept)
                await asyncio.to_thread(stores[1].kill)
                await until(lambda: peers_are(backend, 2))
                await until(all_kept)
                await fill(backend)
                assert await all_there(backend)


def home(backend: PoolBackend, each: StoredObject) -> str:
    return backend.members.placement.of(each.key.chunk.digest)[0]


async def peers_are(backend: PoolBackend, count: int) -> bool:
    peers = backend.members.peers.values()
    return len(peers) == count and all(peer.is_up for peer in peers)

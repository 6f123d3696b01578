"""The store through its client: eviction, quotas, disk, draining, metrics, replicas, leases."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.request import urlopen

import pytest

from cacheflow.cli.checks import Verdict, _pool
from cacheflow.errors import BackendError
from cacheflow.memory import buffer_from
from cacheflow.pool import messages, session
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.pool import PoolBackend, tcp
from cacheflow.storage_backends.pool.channel import Channel
from cacheflow.storage_backends.pool.headers import Headers
from cacheflow.testing.objects import load_one, make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.testing.store_process import free_port
from cacheflow.types import Read, TransferStatus, Write
from tests.unit.pool.storing import SIZE, client, of_tenant, serving, there

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def test_the_least_recently_used_leaves_for_the_new() -> None:
    """A full arena takes what is new and evicts by its policy; what is leased stays."""
    objects = [make_object(number) for number in range(12)]
    async with serving(eviction="lru") as server, client(server) as backend:
        for each in objects[:8]:
            await store_all(backend, each)
        await backend.lookup([each.key.chunk for each in objects[:2]])
        await server.directory.lease("somebody", [objects[2].key])
        for each in objects[8:]:
            await store_all(backend, each)
        server.directory.dismiss("somebody")
        assert await there(backend, objects) == [0, 1, 2, 7, 8, 9, 10, 11]
        assert await backend.used_bytes() == 8 * SIZE


async def test_a_tenant_evicts_its_own_first() -> None:
    """Under a quota a tenant that stores more than its share loses its own oldest objects; the
    other's stay."""
    mine = [make_object(number) for number in range(60)]
    other = [make_object(number) for number in range(100, 104)]
    async with (
        serving(arena=4 << 20, tenant_quota=1 << 20, eviction="lru") as server,
        client(server) as backend,
    ):
        results = await backend.store([of_tenant(each, bytes([1] * 16)) for each in other])
        for each in mine:
            results += await backend.store([of_tenant(each, bytes([2] * 16))])
        assert {result.status for result in results} == {TransferStatus.OK}
        found = await backend.lookup([each.key.chunk for each in (*mine, *other)])
        quota = (1 << 20) // SIZE
        assert [bool(infos) for infos in found] == [False] * (60 - quota) + [True] * (quota + 4)


async def test_what_the_arena_has_no_room_for_is_on_disk(tmp_path: Path) -> None:
    """Objects that were evicted from memory are looked up, listed and read from disk, and are in
    memory again afterwards; deleted ones are nowhere; damaged ones are a miss."""
    objects = [make_object(number) for number in range(20)]
    async with serving(spill=tmp_path, eviction="lru") as server, client(server) as backend:
        spill = server.directory.spill
        assert spill is not None
        for each in objects:
            await store_all(backend, each)
            await spill.drain(10.0)
        assert server.directory.objects == 8
        assert await there(backend, objects[:4]) == [0, 1, 2, 3]
        assert server.directory.counts["read_in"] == 4
        found = await backend.lookup([each.key.chunk for each in objects])
        assert found == [[each.info] for each in objects]
        assert {info.key async for info in backend.scan()} == {each.key for each in objects}
        assert await backend.used_bytes() == 20 * SIZE
        assert await backend.delete([each.key for each in objects[:6]]) == [True] * 6
        assert await there(backend, objects[:6]) == []

        def damage() -> None:
            for path in (tmp_path / "objects").rglob("*"):
                if path.is_file():
                    data = bytearray(path.read_bytes())
                    data[-1] ^= 1
                    path.write_bytes(data)

        await asyncio.to_thread(damage)
        on_disk = [each for each in objects if server.directory.arena.find(each.key) is None]
        assert len(on_disk) > 6
        assert await there(backend, on_disk) == []


async def test_scans_side_by_side_list_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by what there was when it began; one that too many others came after is an error, and
    never a short list."""
    monkeypatch.setattr(session, "_REPLY_BYTES", 1)
    objects = [make_object(number) for number in range(8)]
    async with serving() as server, client(server) as backend:
        for each in objects:
            await store_all(backend, each)

        async def scanned() -> int:
            return len([info async for info in backend.scan()])

        assert await asyncio.gather(*(scanned() for _ in range(session._SCANS))) == [8] * 4
        [peer] = backend.members.up
        first = await peer.ask(messages.Scan(after=0), messages.ScanReply)
        for _ in range(session._SCANS):
            await peer.ask(messages.Scan(after=0), messages.ScanReply)
        for after in (first.after, 7, (1 << 63) - 1):
            with pytest.raises(BackendError, match="begin another"):
                await peer.ask(messages.Scan(after=after), messages.ScanReply)
        assert await scanned() == 8


async def test_what_is_deleted_while_it_is_read_in_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From disk, by somebody who asked for it before."""
    stored = make_object(1)
    async with serving(spill=tmp_path) as server, client(server) as backend:
        await store_all(backend, stored)
        assert server.directory.spill is not None
        await server.directory.spill.drain(10.0)
    async with serving(spill=tmp_path) as server, client(server) as backend:
        spill = server.directory.spill
        assert spill is not None
        real, reading, go_on = spill.read, asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any) -> bool:
            is_there = await real(*arguments)
            reading.set()
            await go_on.wait()
            return is_there

        monkeypatch.setattr(spill, "read", slow)
        read = asyncio.create_task(there(backend, [stored]))
        await reading.wait()
        assert await backend.delete([stored.key]) == [True]
        go_on.set()
        assert await read == []
        assert await backend.lookup([stored.key.chunk]) == [[]]
        assert server.directory.arena.find(stored.key) is None


async def test_bytes_that_are_not_those_promised_are_refused() -> None:
    """A commit whose checksum, or whose header in the slot, is another one than was said makes
    nothing visible and gives the room back."""
    stored = make_object(1)
    async with serving() as server, client(server) as backend:
        altered = bytearray(stored.payload)
        altered[7] ^= 1
        [peer] = backend.members.up
        answer = await peer.ask(messages.Alloc(headers=(stored.header,)), messages.AllocReply)
        [(_, generation, refusal)] = answer.slots
        assert not refusal
        commit = messages.Commit(slots=((generation, 12345),))
        [why] = (await peer.ask(commit, messages.CommitReply)).refused
        assert "not those" in why
        other = make_object(2)
        lie = Write(stored.info, (buffer_from(other.header), buffer_from(other.payload)))
        [result] = await backend.store([lie])
        assert result.status is TransferStatus.FAILED
        assert await backend.lookup([stored.key.chunk, other.key.chunk]) == [[], []]
        assert (server.directory.grants.uncommitted, await backend.used_bytes()) == (0, 0)


async def test_a_draining_store_takes_nothing_new_and_lets_finish() -> None:
    """While it drains, leases are honoured and released, but nothing is found or leased any more;
    new objects and new clients are refused."""
    stored, other = make_object(1), make_object(3)
    async with serving(drain_seconds=5.0) as server, client(server) as backend:
        await store_all(backend, stored, other)
        await backend.lookup([stored.key.chunk])
        await server.directory.lease("somebody", [stored.key])
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        assert server.directory.is_draining
        assert await there(backend, [stored, other]) == [0]
        assert await backend.lookup([stored.key.chunk, other.key.chunk]) == [[], []]
        [result] = await backend.store([make_object(2).write()])
        assert result.status is TransferStatus.REFUSED
        with pytest.raises(OSError, match=r"refused|Connect"):
            await Channel.connect("late", ("127.0.0.1", server.port), None)
        assert not draining.done()
        server.directory.dismiss("somebody")
        [peer] = backend.members.up
        peer.places.forget(stored.key)
        await asyncio.wait_for(draining, 5.0)


async def test_metrics_say_what_happened_and_over_which_transport() -> None:
    """Hits, commits, usage of the arena and clients by transport are on /metrics."""
    objects = [make_object(number) for number in range(3)]
    async with serving(metrics_port=0) as server, client(server) as backend:
        await store_all(backend, *objects)
        await backend.lookup([each.key.chunk for each in (*objects, make_object(9))])
        assert await there(backend, objects) == [0, 1, 2]
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        text = (await asyncio.to_thread(lambda: urlopen(url).read())).decode()
        [part] = backend.parts()
    assert (part.is_up, part.transport) == (True, "tcp")
    for line in (
        'cacheflow_pool_clients{transport="tcp"} 1.0',
        "cacheflow_pool_lookup_chunks_total 4.0",
        "cacheflow_pool_lookup_hits_total 3.0",
        "cacheflow_pool_commits_total 3.0",
        f'cacheflow_tier_used_bytes{{tier="arena"}} {float(3 * SIZE)}',
    ):
        assert line in text.splitlines()


async def test_a_long_lookup_lets_others_have_the_loop() -> None:
    """Of hundreds of chunks a few are dealt with at a time, when their headers are new and when
    they are known: in between all else runs, and the answers are in the order asked."""
    objects = [make_object(number) for number in range(150)]
    async with serving(arena=400 * SIZE) as server, client(server) as backend:
        await store_all(backend, *objects)
        dealt = most = 0

        def counted(work: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any) -> Any:
                nonlocal dealt, most
                dealt += 1
                most = max(most, dealt)
                return work(*args)

            return step

        async def others() -> None:
            nonlocal dealt
            while True:
                dealt = 0
                await asyncio.sleep(0)

        looking = backend.looking
        keys = [each.key.chunk for each in objects]
        with (
            mock.patch.object(looking, "_merged", counted(looking._merged)),
            mock.patch.object(Headers, "keep", counted(Headers.keep)),
            mock.patch.object(backend.members, "of", counted(backend.members.of)),
        ):
            running_others = asyncio.create_task(others())
            for _ in range(2):
                assert await backend.lookup(keys) == [[each.info] for each in objects]
            running_others.cancel()
        assert 0 < most <= 64


async def test_headers_are_sent_once() -> None:
    """A second lookup names the generations that are known and gets no header again; a replaced
    object's is new."""
    stored, new = make_object(1), make_object(1, version=1)
    async with serving() as server, client(server) as backend:
        await store_all(backend, stored)
        assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
        [peer] = backend.members.up
        [known] = backend.looking.headers_of(peer).known([stored.key.chunk])
        request = messages.Lookup(chunks=(stored.key.chunk.digest,), known=(known,), lease=False)
        assert (await peer.ask(request, messages.LookupReply)).found == (((known, b"", 0),),)
        assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
        await store_all(backend, new)
        assert await backend.lookup([stored.key.chunk]) == [[new.info]]


async def test_distrusted_objects_are_deleted() -> None:
    """What a reader found damaged is removed, so that the next save replaces it."""
    stored = make_object(1)
    async with serving() as server, client(server) as backend:
        await store_all(backend, stored)
        backend.distrust([stored.key])
        assert backend._removing is not None
        await backend._removing
        assert await backend.lookup([stored.key.chunk]) == [[]]
        assert await there(backend, [stored]) == []
        reads = [Read(stored.key, 0, buffer_from(bytearray(8)))]
        assert [r.status async for r in backend.load(reads)] == [TransferStatus.MISSING]


async def test_a_lease_that_ends_during_a_read_is_noticed() -> None:
    """A read that is held up until its lease is over and its slot used again is a miss, whatever
    bytes came; one whose slot still has the same generation is believed."""
    mine, *others = [make_object(number) for number in range(9)]
    async with (
        serving(lease_seconds=0.2) as server,
        client(server, transfer_seconds=20.0) as backend,
    ):
        for is_replaced in (False, True):
            await store_all(backend, mine)
            began, gate = asyncio.Event(), asyncio.Event()
            with mock.patch.object(tcp, "receive", held_up(began, gate)):
                reading = asyncio.create_task(load_one(backend, mine.key, 0, SIZE))
                await asyncio.wait_for(began.wait(), 10.0)
                async with asyncio.timeout(10.0):
                    while server.directory.grants.leases:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                if is_replaced:
                    await server.directory.delete([mine.key])
                    for each in others:
                        await store_all(backend, each)
                gate.set()
                result, data = await reading
            if is_replaced:
                assert result.status is TransferStatus.MISSING
                assert "lease" in str(result.error)
            else:
                assert (result.status, data) == (TransferStatus.OK, mine.data)


def held_up(began: asyncio.Event, gate: asyncio.Event) -> Callable[..., Any]:
    """What receives bytes into the caller's memory, on its thread, when ``gate`` is set."""
    loop, receive = asyncio.get_running_loop(), tcp.receive

    def held(*args: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20.0)
        return receive(*args)

    return held


async def test_replicas_survive_the_death_of_a_store() -> None:
    """With two copies of everything any one of three stores may die: all is still there. What has
    to be deleted everywhere says that it is not known to be."""
    objects = [make_object(number) for number in range(12)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(arena=1 << 20)) for _ in range(2)]
        third = serving(arena=1 << 20)
        servers.append(await third.__aenter__())
        peers = [f"localhost:{server.port}" for server in servers]
        backend = await PoolBackend.open({"peers": peers, "transports": ["tcp"], "replicas": 2})
        stack.push_async_callback(backend.aclose)
        await store_all(backend, *objects)
        assert await backend.used_bytes() == 2 * sum(each.info.nbytes for each in objects)
        await third.__aexit__(None, None, None)
        assert await there(backend, objects) == list(range(12))
        with pytest.raises(BackendError, match="cannot be reached"):
            await backend.delete([objects[0].key])
        assert await there(backend, objects[:1]) == []
        [stored] = await backend.store([objects[0].write()])
        assert stored.status is TransferStatus.OK


async def test_doctor_names_each_store_and_its_transport() -> None:
    """Of every pool in the settings each store is listed: up with its transport, or what to do."""
    async with serving() as server:
        dead = f"127.0.0.1:{free_port()}"
        options = {"peers": [f"localhost:{server.port}", dead], "transports": ["tcp"]}
        tier = TierSettings(name="remote", backend="pool", options=options)
        up, down = sorted(await _pool(tier), key=lambda check: check.verdict.value, reverse=True)
        assert (up.verdict, up.name) == (Verdict.OK, f"tier remote: localhost:{server.port}")
        assert up.found == "up, bytes travel by tcp"
        assert (down.verdict, down.name) == (Verdict.NOTE, f"tier remote: {dead}")
        assert "ports" in down.fix
    [refused] = await _pool(TierSettings(name="remote", backend="pool", options={}))
    assert refused.verdict is Verdict.FAIL

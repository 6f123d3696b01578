"""The store: eviction, quotas, disk, tokens and TLS, late clients, metrics; through the client."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.request import urlopen

import pytest
import typer

from cacheflow.cli.checks import Verdict, _pool
from cacheflow.cli.store.serving import serve
from cacheflow.errors import BackendError, ConfigError
from cacheflow.kv import decode_header, encode_header
from cacheflow.memory import buffer_from
from cacheflow.pool import StoreSettings, messages, running
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.pool import PoolBackend, tcp
from cacheflow.storage_backends.pool.channel import Channel, Refused
from cacheflow.storage_backends.pool.headers import Headers
from cacheflow.testing.objects import load_one, make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.testing.store_process import free_port
from cacheflow.types import Read, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from cacheflow.pool import StoreServer
    from cacheflow.testing.objects import StoredObject

SIZE = make_object(1).info.nbytes


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[StoreServer]:
    fixed = {"port": 0, "data_port": 0, "transports": ("tcp",), "arena": 8 * SIZE}
    async with running(StoreSettings(**fixed | settings)) as server:
        yield server


@asynccontextmanager
async def client(server: StoreServer, **options: Any) -> AsyncIterator[PoolBackend]:
    where = {"peers": [f"localhost:{server.port}"], "transports": ["tcp"]}
    backend = await PoolBackend.open(where | options)
    try:
        yield backend
    finally:
        await backend.aclose()


async def there(backend: PoolBackend, objects: list[StoredObject]) -> list[int]:
    """Places of those that can be read; what is read is what was stored."""
    found = []
    for at, each in enumerate(objects):
        result, data = await load_one(backend, each.key, 0, len(each.data))
        if result.status is TransferStatus.OK:
            assert data == each.data
            found.append(at)
        else:
            assert result.status is TransferStatus.MISSING
    return found


def of_tenant(stored: StoredObject, tenant: bytes) -> Write:
    info = decode_header(encode_header(replace(stored.info, tenant_id=tenant)))
    return Write(info, (buffer_from(encode_header(info)), buffer_from(stored.payload)))


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


@pytest.mark.parametrize("token", ["", "another token of 20+"])
async def test_a_store_with_a_token_takes_only_who_says_it(
    token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong token is refused at open with an error that says so and repeats neither; the right
    one works, from the environment or a file."""
    secret = "a token of more than 16 characters"
    monkeypatch.setenv("CACHEFLOW_POOL_TOKEN", token)
    async with serving(token=secret) as server:
        with pytest.raises(ConfigError, match="token") as caught:
            async with client(server):
                pass
        assert secret not in str(caught.value)
        assert not token or token not in str(caught.value)
        monkeypatch.setenv("CACHEFLOW_POOL_TOKEN", secret)
        async with client(server) as backend:
            await store_all(backend, make_object(1))
        file = tmp_path / "token"
        await asyncio.to_thread(file.write_text, secret + "\n")
        monkeypatch.setenv("CACHEFLOW_POOL_TOKEN", "")
        async with client(server, token_file=str(file)) as backend:
            assert await there(backend, [make_object(1)]) == [0]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xb9\xff"])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    """A store that was meant to have a token never runs without one."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=str(file)):
        serve(token_file=file)


async def test_tls_on_side_channel_and_lanes(tmp_path: Path) -> None:
    """With certificates everything goes over TLS; a client that does not know the authority gets
    no connection, one without TLS neither."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(key)]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    objects = [make_object(number) for number in range(4)]
    async with serving(tls_cert=cert, tls_key=key) as server:
        async with client(server, tls=True, tls_ca=str(cert)) as backend:
            await store_all(backend, *objects)
            assert await there(backend, objects) == [0, 1, 2, 3]
        for options in ({"tls": True}, {"tls": False}):
            async with client(server, connect_seconds=0.5, **options) as backend:
                assert await backend.lookup([objects[0].key.chunk]) == [[]]
                with pytest.raises(BackendError, match="cannot be reached"):
                    await backend.used_bytes()


async def test_a_client_that_never_commits_is_disconnected() -> None:
    """Slots that are not committed in time come back when their client has been cut off."""
    async with serving(fill_seconds=0.2) as server:
        channel = await Channel.connect("late", ("127.0.0.1", server.port), None)
        hello = messages.Hello(client="late", token=b"", offers=(("tcp", b""),))
        await channel.ask(hello, messages.HelloReply, 5.0)
        headers = (make_object(1).header, make_object(2).header)
        await channel.ask(messages.Alloc(headers=headers), messages.AllocReply, 5.0)
        assert server.directory.grants.uncommitted == 2
        await asyncio.wait_for(channel.ended, 5.0)
        async with client(server) as backend:
            await store_all(backend, *[make_object(number) for number in range(4)])
        assert server.directory.grants.uncommitted == 0
        await channel.aclose()


async def test_a_draining_store_takes_nothing_new_and_lets_finish() -> None:
    """While it drains, leases are honoured and released, new objects and new clients refused."""
    stored = make_object(1)
    async with serving(drain_seconds=5.0) as server, client(server) as backend:
        await store_all(backend, stored)
        await server.directory.lease("somebody", [stored.key])
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        assert server.directory.is_draining
        assert await there(backend, [stored]) == [0]
        [result] = await backend.store([make_object(2).write()])
        assert result.status is TransferStatus.REFUSED
        with pytest.raises(OSError, match=r"refused|Connect"):
            await Channel.connect("late", ("127.0.0.1", server.port), None)
        assert not draining.done()
        server.directory.dismiss("somebody")
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


async def test_one_connection_cannot_read_what_another_has_leased() -> None:
    """The tcp transport gives bytes only to whoever holds the lease: a range that is not leased to
    this client is refused."""
    stored = make_object(1)
    async with serving() as server, client(server) as one, client(server) as two:
        await store_all(one, stored)
        [slot] = await server.directory.lease("somebody", [stored.key])
        assert slot is not None
        from cacheflow.pool import Piece

        [peer] = two.members.up
        assert peer.link is not None
        buffer = buffer_from(bytearray(SIZE))
        with pytest.raises(BackendError, match="no lease"):
            await peer.link.read([Piece(slot.offset, slot.generation, buffer)], deadline=5.0)
        assert not any(buffer.view or b"")
        server.directory.dismiss("somebody")


async def test_a_store_that_knows_no_common_transport_says_so() -> None:
    """A client that offers only what the store has not is refused by name."""
    async with serving() as server:
        channel = await Channel.connect("odd", ("127.0.0.1", server.port), None)
        hello = messages.Hello(client="odd", token=b"", offers=(("pigeon", b""),))
        with pytest.raises(Refused, match=r"pigeon.*tcp"):
            await channel.ask(hello, messages.HelloReply, 5.0)
        await channel.aclose()


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of peers, dns and etcd"),
        ({"peers": ["a:1"], "dns": "b:1"}, "one of peers, dns and etcd"),
        ({"peers": ["a:b"]}, "host:port"),
        ({"peers": ["a:1", "a:1"]}, "twice"),
        ({"peers": ["a:1"], "token": "secret"}, "Extra inputs"),
        ({"peers": ["a:1"], "transports": ["pigeon"]}, "none works here"),
        ({"peers": ["a:1"], "transports": []}, "transports': it is empty"),
    ],
)
async def test_unusable_options_are_named(options: dict[str, object], said: str) -> None:
    """An option that cannot be used is a ConfigError that says which and why."""
    with pytest.raises(ConfigError, match=said):
        await PoolBackend.open(options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "token"),
        ({"token": "short"}, "16 characters"),
        ({"etcd": "http://e:1"}, "advertise"),
        ({"tls_cert": "a.pem"}, "tls_key"),
        ({"arena": 1}, "arena"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], said: str) -> None:
    """A store does not start half: what is missing is said. One that anybody could reach and use is
    not started by accident."""
    with pytest.raises(ConfigError, match=said):
        StoreSettings(**settings)


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

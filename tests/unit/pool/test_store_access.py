"""Who may talk to a store: tokens, TLS, transports, leases of others, clients that hang on."""

from __future__ import annotations

import asyncio
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import typer

from cacheflow.cli.store.serving import serve
from cacheflow.errors import BackendError, ConfigError
from cacheflow.memory import buffer_from
from cacheflow.pool import StoreSettings, messages
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.storage_backends.pool.channel import Channel, Refused
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from tests.unit.pool.storing import SIZE, client, serving, there

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "one of peers, dns and etcd"),
        ({"peers": ["a:1"], "dns": "b:1"}, "one of peers, dns and etcd"),
        ({"etcd": "etcd://a:1"}, "'etcd': write it as http://"),
        ({"etcd": "http://root:hunter2@a:1"}, "'etcd': must hold no credentials"),
        ({"peers": ["root:hunter2@a:1"]}, "'peers': an address must hold no credentials"),
        ({"dns": "root:hunter2@a:1"}, "'dns': an address must hold no credentials"),
        ({"peers": ["a:b"]}, "host:port"),
        ({"peers": ["a:1", "a:1"]}, "twice"),
        ({"peers": ["a:1"], "token": "secret"}, "'token': there is no such option"),
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

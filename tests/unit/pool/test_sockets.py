"""A store finds out by itself that a client is gone, or takes nothing any more."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from cacheflow.memory import InFlight, buffer_from
from cacheflow.pool import watch_socket
from cacheflow.storage_backends.pool import lane, target
from cacheflow.storage_backends.pool.lane import Operation
from cacheflow.storage_backends.pool.target import ANSWER, TcpTarget
from cacheflow.testing.storage_harness import idle
from tests.unit.pool.storing import client, serving
from tests.waiting import until

if TYPE_CHECKING:
    import pytest

    from cacheflow.types import Hold

MUCH = 64 << 20
"""More than the kernel keeps for who does not read."""


class Open:
    """Lets everybody touch everything."""

    def __init__(self) -> None:
        self.hold = InFlight()

    def enter(
        self, client: str, generation: int, offset: int, nbytes: int, *, writing: bool
    ) -> Hold | None:
        self.hold.acquire()
        return self.hold


async def test_a_client_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a little now and then makes progress for ever, and would keep the slot as
    long. Others are served."""
    monkeypatch.setattr(target, "_GONE_SECONDS", 0.5)
    monkeypatch.setattr(target, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(target, "_LEAST_RATE", 1 << 30)
    access = Open()
    store = await TcpTarget.listening(buffer_from(bytearray(MUCH)), access, "127.0.0.1", 0, None)
    port, secret = ANSWER.unpack(await store.admit("client", b""))

    def trickle() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            ask = lane.pack_request(Operation.READ, 1, 0, MUCH)
            connection.sendall(lane.greeting(secret) + ask)
            connection.settimeout(20)
            with suppress(ConnectionError):
                for _ in range(MUCH):
                    if not connection.recv(1 << 10):
                        return
                    time.sleep(0.002)

    await asyncio.to_thread(trickle)
    await idle(access.hold)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(lane.greeting(secret) + lane.pack_request(Operation.READ, 1, 0, 8))
        got = await asyncio.to_thread(lane.receive_reply, connection, memoryview(bytearray(8)))
        assert got is lane.Status.OK
    await store.aclose()


async def test_a_client_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stands still in the middle of a read (its kernel goes on answering) does not
    keep the slot, nor the thread, for longer than a while."""
    monkeypatch.setattr(target, "_GONE_SECONDS", 0.5)
    access = Open()
    store = await TcpTarget.listening(buffer_from(bytearray(MUCH)), access, "127.0.0.1", 0, None)
    port, secret = ANSWER.unpack(await store.admit("client", b""))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(lane.greeting(secret) + lane.pack_request(Operation.READ, 1, 0, MUCH))
        await until(lambda: access.hold.in_flight > 0)
        await idle(access.hold)
        await until(lambda: not store._threads)
    await store.aclose()


async def test_side_channels_are_watched() -> None:
    """A client whose machine vanishes must not have its place, and its leases, for ever."""
    async with serving() as server, client(server):
        [session] = server._sessions.values()
        assert session._writer is not None
        connection = session._writer.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        pauses = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        idle_seconds, pause = (connection.getsockopt(socket.IPPROTO_TCP, o) for o in pauses)
        probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert idle_seconds + probes * pause <= 60


def test_what_a_system_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every system has all of it; probing a silent peer at all, all have."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT")
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    with socket.socket() as connection:
        watch_socket(connection, 30)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

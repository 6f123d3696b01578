"""How many lanes the tcp transport has to a store."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from cacheflow.errors import BackendError
from cacheflow.memory import buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.pool import tcp
from cacheflow.storage_backends.pool.target import TcpTarget
from cacheflow.storage_backends.pool.tcp import TcpTransport
from tests.unit.pool.test_sockets import Open

PART = 64 << 10


@pytest.mark.parametrize(("cores", "lanes"), [(1, 2), (2, 2), (3, 3), (64, 4)])
async def test_there_are_no_more_lanes_than_cores_to_copy(
    cores: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least two, at most four; all reads come, right, whatever waits for a lane."""
    monkeypatch.setattr(tcp, "usable_cores", lambda: cores)
    data = hashlib.shake_256(b"data").digest(16 * PART)
    store = await TcpTarget.listening(buffer_from(bytearray(data)), Open(), "127.0.0.1", 0, None)
    transport = TcpTransport(None)
    link = await transport.connect("s", "127.0.0.1", await store.admit("c", b""))
    buffers = [buffer_from(bytearray(PART)) for _ in range(16)]
    pieces = [Piece(at * PART, 1, buffer) for at, buffer in enumerate(buffers)]
    await asyncio.gather(*(link.read([piece], deadline=20) for piece in pieces))
    assert b"".join(bytes(buffer.view or b"") for buffer in buffers) == data
    assert 1 <= len(store._lanes) <= lanes
    assert link._threads.count == lanes
    await transport.aclose()
    await store.aclose()


async def test_a_closed_link_fails_as_a_broken_one_does() -> None:
    """Who still holds it learns that its store is not reached this way, also when its threads are
    gone: nothing but BackendError is expected of a link."""
    store = await TcpTarget.listening(buffer_from(bytearray(PART)), Open(), "127.0.0.1", 0, None)
    transport = TcpTransport(None)
    link = await transport.connect("s", "127.0.0.1", await store.admit("c", b""))
    buffer = buffer_from(bytearray(PART))
    for close in (link.close, link.aclose):
        if (closing := close()) is not None:
            await closing
        with pytest.raises(BackendError, match="the link was closed"):
            await link.read([Piece(0, 1, buffer)], deadline=20)
    await transport.aclose()
    await store.aclose()

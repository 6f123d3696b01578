"""Stores whose connection ends under way: a slot is its client's until nothing can write to it, and
is written over the connection that it was given on or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest import mock

from cacheflow.errors import BackendError
from cacheflow.pool import messages
from cacheflow.storage_backends.pool.peer import Peer
from cacheflow.storage_backends.pool.tcp import TcpLink
from cacheflow.testing.objects import make_object
from cacheflow.types import TransferStatus
from tests.unit.pool.storing import client, serving
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.pool import Piece


async def reconnected(peer: Peer) -> None:
    """Its link is made anew, as after a transfer that failed."""
    link = peer.link
    assert link is not None
    peer.suspect_link(link, BackendError("a fault", operation="store", context=peer.name))
    await until(lambda: peer.is_up and peer.link is not link)


async def test_a_slot_is_its_clients_as_long_as_it_may_be_written() -> None:
    """The client gives its connection up with a write under way: the store keeps the slot until the
    write has ended, and takes it back then."""
    stored = make_object(1)
    reached, opened = asyncio.Event(), asyncio.Event()

    async def slow(link: TcpLink, pieces: Sequence[Piece], *, deadline: float) -> None:
        hold = pieces[0].buffer.hold
        hold.acquire()
        reached.set()
        await opened.wait()
        hold.release()
        raise BackendError("late", operation="store", context="tcp", is_temporary=True)

    async with serving() as server, client(server) as backend:
        [peer] = backend.members.up
        with mock.patch.object(TcpLink, "write", slow):
            storing = asyncio.create_task(backend.store([stored.write()]))
            await reached.wait()
            await reconnected(peer)
            await backend.used_bytes()
            assert server.directory.grants.uncommitted == 1
            opened.set()
            [result] = await storing
        assert result.status is TransferStatus.FAILED
        await until(lambda: server.directory.grants.uncommitted == 0)
        await until(lambda: server.stat().clients == 1)


async def test_a_slot_is_not_written_over_another_connection() -> None:
    """Between ALLOC and the write the connection is made anew: by then others may have the slot."""
    ask = Peer.ask

    async def interrupted(peer: Peer, request: Any, *rest: Any, **options: Any) -> Any:
        answer = await ask(peer, request, *rest, **options)
        if isinstance(request, messages.Alloc):
            await reconnected(peer)
        return answer

    async with serving() as server, client(server) as backend:
        write = mock.AsyncMock()
        with (
            mock.patch.object(Peer, "ask", interrupted),
            mock.patch.object(TcpLink, "write", write),
        ):
            [result] = await backend.store([make_object(1).write()])
        assert result.status is TransferStatus.FAILED
        write.assert_not_awaited()
        await until(lambda: server.directory.grants.uncommitted == 0)
        [again] = await backend.store([make_object(1).write()])
        assert again.status is TransferStatus.OK

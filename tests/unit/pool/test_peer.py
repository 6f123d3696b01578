"""A client's view of one store: what befalls its link, and that it always tries on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest import mock

from cacheflow.errors import BackendError
from cacheflow.storage_backends.pool import looking
from cacheflow.storage_backends.pool.peer import Peer
from cacheflow.storage_backends.pool.tcp import TcpTransport
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from tests.unit.pool.storing import client, serving, there
from tests.waiting import until

if TYPE_CHECKING:
    from cacheflow.storage_backends.pool.channel import Channel


async def test_a_link_that_breaks_while_the_store_is_asked_how_it_is() -> None:
    """The answer makes the store fit again; the link is made anew all the same."""
    answers, asked, answer = Peer._answers, asyncio.Event(), asyncio.Event()

    async def slow(self: Peer, channel: Channel) -> bool:
        asked.set()
        await answer.wait()
        return await answers(self, channel)

    async with serving() as server, client(server) as backend:
        await store_all(backend, make_object(1))
        [peer] = backend.members.up
        link, channel = peer.link, peer._channel
        assert link is not None
        assert channel is not None
        with mock.patch.object(Peer, "_answers", slow):
            peer._suspect(channel)
            await asked.wait()
            peer.suspect_link(link, BackendError("broke", operation="load"))
            answer.set()
            await until(lambda: peer.is_up)
        assert peer.link is not link
        assert await there(backend, [make_object(1)]) == [0]


async def test_whatever_a_transport_raises_the_store_is_tried_again() -> None:
    """Transports are plugins: one that breaks its contract must not cost the store for good."""
    connect, failures = TcpTransport.connect, iter([RuntimeError("not in the contract")])

    async def failing(self: TcpTransport, *args: str | bytes) -> object:
        for failure in failures:
            raise failure
        return await connect(self, *args)  # type: ignore[arg-type]

    async with serving() as server:
        with mock.patch.object(TcpTransport, "connect", failing):
            async with client(server) as backend:
                [peer] = backend.members.peers.values()
                await until(lambda: peer.is_up)
                assert next(failures, None) is None
                await store_all(backend, make_object(1))
                assert await there(backend, [make_object(1)]) == [0]


async def test_leases_of_a_connection_that_is_over_are_not_remembered() -> None:
    """The answer to a lookup is still being decoded when its connection ends, and its leases with
    it: what lies in those slots now is anybody's."""
    decoded = looking._decoded

    async def slow(*args: Any) -> Any:
        await peer._lose("cut")
        return await decoded(*args)

    async with serving() as server, client(server) as backend:
        await store_all(backend, stored := make_object(1))
        [peer] = backend.members.up
        with mock.patch.object(looking, "_decoded", slow):
            [found] = await backend.lookup([stored.key.chunk])
        assert [info.key for info in found] == [stored.key]
        assert peer.places.find(stored.key) is None
        await until(lambda: peer.is_up)
        assert await there(backend, [stored]) == [0]
        await backend.lookup([stored.key.chunk])
        assert peer.places.find(stored.key) is not None

"""The client's half over agents that do as they are told: what becomes of stores when one hangs."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import BackendError, ConfigError
from cacheflow.memory import InFlight, buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl import NixlTransport, worker
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.worker import Worker
from tests.cancelling import Held, cancelled_during
from tests.unit.nixl.scripted import ScriptedAgent, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.types import Buffer

pytestmark = pytest.mark.both_loops

SLAB = 64 << 10
PART = SLAB // 8


def hello(store: str) -> bytes:
    """Of a store: its agent is called so, and is what the scripted agent takes it for."""
    return Hello(store, 1 << 40, 1 << 30, store.encode()).encode()


class Agents:
    """All agents that were made, in order; ``refuse``: why there will be no other one."""

    def __init__(self) -> None:
        self.made: list[ScriptedAgent] = []
        self.refuse: Exception | None = None

    async def start(self) -> Worker:
        if self.refuse is not None:
            raise self.refuse
        self.made.append(agent := ScriptedAgent())
        return await Worker.start(lambda: agent, 16, SLAB)

    def begun(self) -> list[int]:
        """Transfers begun by each."""
        return [len(agent.begun) for agent in self.made]

    def end_all(self) -> None:
        for agent in self.made:
            for begun in agent.begun:
                begun.end = begun.end or True


@asynccontextmanager
async def opened(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[NixlTransport, Agents]]:
    """What was hung ends with the block, and then nothing is held any more."""
    monkeypatch.setattr(worker, "_PART_SECONDS", 0.05)
    agents = Agents()
    transport = NixlTransport(await agents.start(), agents.start)
    yield transport, agents
    agents.end_all()
    await transport.aclose()
    assert transport.in_flight == 0
    assert transport.quarantined_bytes == 0


async def registered(transport: NixlTransport) -> Buffer:
    """64 bytes that every agent knows."""
    buffer = buffer_from(bytearray(64), InFlight())
    transport.register_memory(buffer)
    await until(lambda: all(each.memory.is_registered(buffer) for each in transport._workers))
    return buffer


async def hang(transport: NixlTransport, link: NixlLink, *buffers: Buffer, most: int = 1) -> None:
    """A read into each, of which so many begin, and are then given up, and the link with them."""
    before = transport.in_flight
    reads = [asyncio.ensure_future(link.read([Piece(0, 0, each)], deadline=60)) for each in buffers]
    await until(lambda: transport.in_flight == before + most)
    for reading in reads:
        reading.cancel()
    await asyncio.wait(reads)
    link.close()


async def settled(transport: NixlTransport) -> None:
    """What has ended has been told."""
    for each in transport._workers:
        await each.reactor.call(lambda agent: None)
        await each.reactor.call(lambda agent: None)


async def read(link: NixlLink, buffer: Buffer, agent: ScriptedAgent) -> None:
    """One that ends, over ``agent``."""
    count = len(agent.begun)
    reading = asyncio.ensure_future(link.read([Piece(0, 0, buffer)], deadline=5))
    await until(lambda: len(agent.begun) > count)
    agent.begun[-1].end = True
    await reading


async def test_a_store_whose_transfers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is greeted by another agent, which knows our memory too; what the transfer touches stays
    held until it ends. Then one agent is enough again."""
    async with opened(monkeypatch) as (transport, agents):
        hung, other = await registered(transport), await registered(transport)
        await hang(transport, await transport.connect("s", "", hello("s")), hung)
        link = await transport.connect("s", "", hello("s"))
        assert transport.agents == 2
        first, second = agents.made
        await until(lambda: transport._workers[1].memory.is_registered(other))
        await read(link, other, second)
        assert second.begun[-1].ours == [(other.address, 64)]
        assert hung.hold.in_flight == 1
        assert first.removed == []
        link.close()
        first.begun[0].end = True
        await until(lambda: not hung.hold.in_flight)
        await settled(transport)
        link = await transport.connect("s", "", hello("s"))
        await read(link, hung, first)
        assert transport.agents == 1


async def test_a_peer_that_is_added_for_nobody_is_parted_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread adds it all the same after who wanted to connect was cancelled."""
    async with opened(monkeypatch) as (transport, agents):
        held = Held(agents.made[0].add)
        agents.made[0].add = held  # type: ignore[method-assign]
        await cancelled_during(transport.connect("peer", "host", hello("store")), held)
        await settled(transport)
        assert agents.made[0].removed == ["store"]


async def test_other_stores_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One store's hanging transfers change nothing for the others, neither for their links nor for
    those that are made meanwhile."""
    async with opened(monkeypatch) as (transport, agents):
        hung, other = await registered(transport), await registered(transport)
        steady = await transport.connect("t", "", hello("t"))
        await hang(transport, await transport.connect("s", "", hello("s")), hung)
        again = await transport.connect("s", "", hello("s"))
        late = await transport.connect("u", "", hello("u"))
        for link in (steady, late):
            await read(link, other, agents.made[0])
        await read(again, other, agents.made[1])
        assert transport.agents == 2


async def test_agents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with which everything hangs is given up at last, with an error that says so; what is
    held is what has hung, and other stores go on."""
    async with opened(monkeypatch) as (transport, agents):
        hung, other = await registered(transport), await registered(transport)
        for _ in range(4):
            await hang(transport, await transport.connect("s", "", hello("s")), hung)
        with pytest.raises(BackendError, match=r"each of the 4 NIXL .*transport tcp") as caught:
            await transport.connect("s", "", hello("s"))
        assert caught.value.is_temporary
        assert hung.hold.in_flight == 4
        assert agents.begun() == [1, 1, 1, 1]
        await read(await transport.connect("t", "", hello("t")), other, agents.made[0])
        agents.end_all()
        await until(lambda: not hung.hold.in_flight)
        await settled(transport)
        await read(await transport.connect("s", "", hello("s")), hung, agents.made[0])


async def test_an_agent_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The locked memory may not suffice for one more: an error that can pass, with both reasons."""
    async with opened(monkeypatch) as (transport, agents):
        buffer = await registered(transport)
        await hang(transport, await transport.connect("s", "", hello("s")), buffer)
        agents.refuse = ConfigError("ulimit -l")
        with pytest.raises(BackendError, match=r"older connection.*ulimit -l") as caught:
            await transport.connect("s", "", hello("s"))
        assert caught.value.is_temporary
        agents.refuse = None
        await transport.connect("s", "", hello("s"))


async def test_who_connects_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that he waits for is made all the same, once, and is the next one's."""
    async with opened(monkeypatch) as (transport, agents):
        buffer = await registered(transport)
        await hang(transport, await transport.connect("s", "", hello("s")), buffer)
        gate, start = asyncio.Event(), agents.start

        async def slow() -> Worker:
            await gate.wait()
            return await start()

        transport._start = slow
        waiting = [asyncio.ensure_future(transport.connect("s", "", hello("s"))) for _ in range(2)]
        await until(lambda: transport._starting is not None)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        gate.set()
        await read(await waiting[1], buffer, agents.made[1])
        assert len(agents.made) == transport.agents == 2


async def test_an_agent_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL hangs in a call: whoever needs that thread fails in time; the next one gets another."""
    monkeypatch.setattr(worker, "_STUCK_SECONDS", 0.05)
    async with opened(monkeypatch) as (transport, agents):
        buffer, gate = await registered(transport), threading.Event()
        monkeypatch.setattr(agents.made[0], "add", lambda metadata: gate.wait(30) and "s")
        tries = 0
        while transport.agents == 1:
            tries += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    link = await transport.connect("s", "", hello("s"))
        assert tries > 1
        await read(link, buffer, agents.made[1])
        gate.set()


async def test_a_slab_held_by_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose transfers hang has at most its share of the slab; if many have, who needs room
    is told soon, and is given another agent."""
    monkeypatch.setattr("cacheflow.storage_backends.nixl.memory._ROOM_SECONDS", 0.05)
    async with opened(monkeypatch) as (transport, agents):
        parts = [buffer_from(bytearray(PART), InFlight()) for _ in range(5)]
        links = [await transport.connect(name, "", hello(name)) for name in "stuv"]
        for link, held in zip(links, (2, 4, 6), strict=False):
            await hang(transport, link, *parts, most=2)
            assert transport.quarantined_bytes == held * PART
        assert agents.begun() == [6]
        late = [links[3].write([Piece(0, 0, each)], deadline=30) for each in parts[:3]]
        writing = [asyncio.ensure_future(each) for each in late]
        done, _ = await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(BackendError, match="slab are held by transfers that hang"):
            await done.pop()
        link = await transport.connect("w", "", hello("w"))
        assert transport.agents == 2
        await read(link, parts[0], agents.made[1])
        agents.end_all()
        await asyncio.gather(*writing, return_exceptions=True)


async def test_memory_goes_though_others_transfers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's memory is deregistered when its own transfers have ended; those of another one
    may hang for ever."""
    async with opened(monkeypatch) as (transport, agents):
        hung, gone = await registered(transport), buffer_from(bytearray(64))
        end = transport.register_memory(gone)
        await hang(transport, await transport.connect("s", "", hello("s")), hung)
        link = await transport.connect("s", "", hello("s"))
        await until(lambda: [len(agent.regions) for agent in agents.made] == [3, 3])
        end()
        end()
        await until(lambda: [len(agent.regions) for agent in agents.made] == [2, 2])
        await read(link, gone, agents.made[1])

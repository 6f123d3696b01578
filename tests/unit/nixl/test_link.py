"""Links over an agent that does as it is told: what goes how, and what is held meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import BackendError
from cacheflow.memory import InFlight, buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.link import NixlLink
from cacheflow.storage_backends.nixl.memory import OurMemory
from cacheflow.storage_backends.nixl.reactor import Reactor
from cacheflow.types import Buffer, MemoryKind
from tests.unit.nixl.scripted import ScriptedAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ARENA = Hello("store", 1 << 40, 1 << 30, b"metadata")
SLAB = 64 << 10
PART = SLAB // 8


@asynccontextmanager
async def linked(
    agent: ScriptedAgent, depth: int = 16
) -> AsyncIterator[tuple[NixlLink, OurMemory, Reactor]]:
    reactor = Reactor(lambda: agent, depth=depth)
    await reactor.start()
    memory = await OurMemory.open(reactor, asyncio.get_running_loop(), SLAB)
    closed: list[bool] = []
    link = NixlLink("store", ARENA, reactor, memory, lambda: closed.append(True))
    yield link, memory, reactor
    link.close()
    link.close()
    assert closed == [True]
    for begun in agent.begun:
        begun.end = begun.end or True
    assert await reactor.aclose(5.0)
    await memory.aclose()
    assert memory.quarantined_bytes == 0


async def turn(reactor: Reactor) -> None:
    """The thread has carried out what it was told, and has had a few turns since."""
    for _ in range(6):
        await reactor.call(lambda agent: None)


def device(nbytes: int) -> Buffer:
    return Buffer(1 << 50, nbytes, MemoryKind.DEVICE, None, InFlight())


async def test_registered_memory_goes_as_it_lies() -> None:
    """Pieces in registered memory are one transfer, to where they are in the store's arena."""
    agent, first, second = ScriptedAgent(), buffer_from(bytearray(64)), buffer_from(bytearray(32))
    async with linked(agent) as (link, memory, reactor):
        for each in (first, second):
            memory.register_memory(each)
        await turn(reactor)
        pieces = [Piece(1000, 0, first), Piece(5, 0, second)]
        read = asyncio.ensure_future(link.read(pieces, deadline=5))
        await asyncio.sleep(0)
        await turn(reactor)
        [begun] = agent.begun
        assert (begun.way, begun.kind) == ("READ", MemoryKind.PAGEABLE)
        assert begun.ours == [(first.address, 64), (second.address, 32)]
        assert begun.theirs == [((1 << 40) + 1000, 64), ((1 << 40) + 5, 32)]
        begun.end = True
        await read
        assert first.hold.in_flight == second.hold.in_flight == 0


async def test_other_memory_goes_by_the_slab() -> None:
    """Part by part, copied in before a write and out after a read; only the slab is touched."""
    agent, data = ScriptedAgent(), bytes(range(256)) * 80
    async with linked(agent) as (link, _, reactor):
        buffer = buffer_from(bytearray(data))
        write = asyncio.ensure_future(link.write([Piece(7, 0, buffer)], deadline=5))
        for number in range(3):
            while len(agent.begun) <= number:
                await turn(reactor)
            agent.begun[number].end = True
        await write
        assert [begun.ours[0][1] for begun in agent.begun] == [PART, PART, len(data) - 2 * PART]
        starts = [begun.theirs[0][0] - (1 << 40) for begun in agent.begun]
        assert starts == [7, 7 + PART, 7 + 2 * PART]
        [slab] = agent.regions
        assert isinstance(slab, tuple)
        for begun in agent.begun:
            assert slab[0] <= begun.ours[0][0] < slab[0] + SLAB


async def test_device_memory_is_transferred_as_such() -> None:
    """Once it is registered, or will be by the time that it begins, in a transfer of its own;
    else it is refused."""
    agent, ours, host = ScriptedAgent(), device(4096), buffer_from(bytearray(64))
    async with linked(agent) as (link, memory, reactor):
        with pytest.raises(ValueError, match="registered"):
            await link.read([Piece(0, 0, ours)], deadline=5)
        assert ours.hold.in_flight == 0
        for each in (ours, host):
            memory.register_memory(each)
        read = asyncio.ensure_future(link.read([Piece(0, 0, ours), Piece(0, 0, host)], deadline=5))
        while len(agent.begun) < 2 and not read.done():
            await turn(reactor)
        assert {begun.kind: begun.ours for begun in agent.begun} == {
            MemoryKind.DEVICE: [(1 << 50, 4096)],
            MemoryKind.PAGEABLE: [(host.address, 64)],
        }
        for begun in agent.begun:
            begun.end = True
        await read


async def test_memory_that_is_not_registered_any_more() -> None:
    """The end of a registration holds at once for what begins, and at last for the hardware."""
    agent, buffer = ScriptedAgent(), buffer_from(bytearray(64))
    async with linked(agent) as (link, memory, reactor):
        end = memory.register_memory(buffer)
        await turn(reactor)
        read = asyncio.ensure_future(link.read([Piece(0, 0, buffer)], deadline=5))
        await asyncio.sleep(0)
        end()
        end()
        again = asyncio.ensure_future(link.read([Piece(0, 0, buffer)], deadline=5))
        while len(agent.begun) < 2:
            await turn(reactor)
        assert len(agent.regions) == 2  # the first transfer may be at it
        assert agent.begun[0].ours == [(buffer.address, 64)]
        assert agent.begun[1].ours != [(buffer.address, 64)]
        for begun in agent.begun:
            begun.end = True
        await asyncio.gather(read, again)
        await turn(reactor)
        assert len(agent.regions) == 1


async def test_deadlines_end_the_waiting_only() -> None:
    """What has begun stays held after its deadline; what has not is taken back."""
    agent, holds = ScriptedAgent(), [InFlight(), InFlight()]
    async with linked(agent, depth=1) as (link, memory, reactor):
        buffers = [buffer_from(bytearray(64), hold) for hold in holds]
        for buffer in buffers:
            memory.register_memory(buffer)
        await turn(reactor)
        reads = [link.read([Piece(0, 0, each)], deadline=0.05) for each in buffers]
        for result in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(result, BackendError)
            assert result.is_temporary
        assert sorted(hold.in_flight for hold in holds) == [0, 1]
        agent.begun[0].end = True
        await turn(reactor)
        assert [hold.in_flight for hold in holds] == [0, 0]
        assert len(agent.begun) == 1


async def test_a_broken_link_stays_broken() -> None:
    """After a failure nothing more is tried, whatever became of the peer."""
    agent, buffer = ScriptedAgent(), buffer_from(bytearray(64))
    async with linked(agent) as (link, memory, reactor):
        memory.register_memory(buffer)
        await turn(reactor)
        agent.refuse = RuntimeError("REMOTE_DISCONNECT")
        with pytest.raises(BackendError, match="DISCONNECT") as caught:
            await link.read([Piece(0, 0, buffer)], deadline=5)
        assert caught.value.is_temporary
        agent.refuse = None
        with pytest.raises(BackendError, match="broke"):
            await link.write([Piece(0, 0, buffer)], deadline=5)
        assert agent.begun == []
        assert buffer.hold.in_flight == 0

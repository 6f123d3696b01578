"""The NIXL transport between two real processes: right bytes, and stores that die or hang.

Over plain TCP, where the store's process has to take part in every transfer, and over what UCX
picks by itself, which is shared memory on one machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from nixl_store import content, running_store

from cacheflow.errors import BackendError, ClosedError
from cacheflow.memory import InFlight, StagingPool, buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl import NixlTransport
from cacheflow.storage_backends.nixl.agent import why_missing
from cacheflow.testing.storage_harness import idle
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from nixl_store import BareStore

    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.types import Buffer

if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)

ARENA = 16 << 20
PART = 1 << 20
CONTENT = content(ARENA)


@pytest.fixture(params=["tcp", "all"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use, in this process and in those it starts."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[BareStore, NixlTransport, NixlLink]]:
    async with running_store(ARENA) as store:
        transport = await NixlTransport.open(slab_bytes=8 << 20)
        try:
            yield store, transport, await transport.connect("a", "", store.answer)
        finally:
            await transport.aclose()


async def registered(transport: NixlTransport, pool: StagingPool) -> None:
    """Register the pool's memory, and wait until it is."""
    transport.register_memory(pool.arena)
    await until(lambda: transport._workers[0].memory.is_registered(pool.arena))


def seen(buffer: Buffer) -> bytes:
    assert buffer.view is not None
    return bytes(buffer.view)


async def outcome(transfer: Awaitable[None]) -> BackendError | None:
    """How a transfer failed, which is never for good."""
    try:
        await transfer
    except BackendError as error:
        return error if error.is_temporary else pytest.fail(f"{error} is for good")
    return None


async def test_right_bytes(transports: str) -> None:
    """Reads and writes of any range and alignment, in registered memory and in other, several
    pieces in one call: the right bytes, nothing around them touched, nothing held."""
    async with linked() as (store, transport, link):
        pool = StagingPool(8 << 20)
        await registered(transport, pool)
        for offset, nbytes in [(0, 4096), (1, 1), (4095, 70_001), (ARENA - 3_000_000, 3_000_000)]:
            memory = memoryview(bytearray(b"\xee" * (nbytes + 64)))
            with await pool.lease(nbytes) as lease:
                both = [lease.buffer, buffer_from(memory[32 : 32 + nbytes])]
                await link.read([Piece(offset, 0, each) for each in both], deadline=10)
                expected = CONTENT[offset : offset + nbytes]
                assert [seen(each) == expected for each in both] == [True, True]
                assert bytes(memory[:32]) == bytes(memory[-32:]) == b"\xee" * 32
                assert [each.hold.in_flight for each in both] == [0, 0]
        data = hashlib.shake_256(b"new").digest(2_500_000)
        with await pool.lease(1_000_000) as lease:
            lease.view[:] = data[:1_000_000]
            rest = buffer_from(data[1_000_000:])
            pieces = [Piece(777, 0, lease.buffer), Piece(1_000_777, 0, rest)]
            await link.write(pieces, deadline=10)
        assert await store.order("digest", 777, len(data)) == hashlib.sha256(data).hexdigest()
        for offset in (-1, ARENA - 4095):
            with pytest.raises(ValueError, match="not in an arena"):
                await link.read([Piece(offset, 0, buffer_from(bytearray(4096)))], deadline=10)
        link.close()
        with pytest.raises(BackendError, match="closed"):
            await link.read([Piece(0, 0, buffer_from(bytearray(16)))], deadline=10)
        again = await transport.connect("a", "", store.answer)
        await again.read([Piece(PART, 0, buffer := buffer_from(bytearray(4096)))], deadline=10)
        assert seen(buffer) == data[PART - 777 :][:4096]
        await pool.aclose()


async def test_a_store_that_is_killed(transports: str) -> None:
    """Reads under way end at once, right or with an error; nothing stays held; the same client goes
    on with the store's next start, and has had another one all the time."""
    async with linked() as (store, transport, link), running_store(ARENA) as other:
        steady = await transport.connect("b", "", other.answer)
        ended: list[bool] = []

        async def read(over: NixlLink, number: int) -> None:
            buffer = buffer_from(bytearray(PART))
            error = await outcome(over.read([Piece(number * PART, 0, buffer)], deadline=5))
            if error is None:
                assert seen(buffer) == CONTENT[number * PART : (number + 1) * PART]
            else:
                assert over is link
            assert buffer.hold.in_flight == 0
            ended.append(error is None)

        async def keep_reading(over: NixlLink, first: int) -> None:
            for number in range(24):
                await read(over, (first + number) % 16)
                if number == 4 and over is link:
                    await store.kill()

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for first in range(3):
                group.create_task(keep_reading(link, first))
                group.create_task(keep_reading(steady, first))
        assert len(ended) == 6 * 24
        assert False in ended
        link.close()
        async with running_store(ARENA) as restarted:
            again = await transport.connect("a", "", restarted.answer)
            await read(again, 3)
        assert ended[-1]
        assert transport.in_flight == 0


async def test_a_store_that_hangs(transports: str) -> None:
    """A read from a stopped store ends at its deadline and its memory stays held; when the store
    goes on, so does the link, and the memory comes back. In shared memory the read needs nobody's
    help, mostly: UCX may still be making the connection."""
    async with linked() as (store, transport, link):
        pool = StagingPool(8 << 20, pin=False)
        await registered(transport, pool)
        lease, loop = await pool.lease(PART), asyncio.get_running_loop()
        piece = Piece(PART, 0, lease.buffer)
        await link.read([piece], deadline=10)
        lease.view[:] = bytes(PART)
        await store.freeze()
        start = loop.time()
        error = await outcome(link.read([piece], deadline=1))
        assert loop.time() - start < 10
        late = "1 s" in str(error)
        assert late or transports == "all"
        assert late or bytes(lease.view) == CONTENT[PART : 2 * PART]
        assert lease.hold.in_flight == late
        lease.release()
        assert pool.quarantined_bytes() == (PART if late else 0)
        store.thaw()
        await idle(lease.hold)
        assert pool.quarantined_bytes() == 0
        with await pool.lease(PART) as lease:
            await link.read([Piece(5 * PART, 0, lease.buffer)], deadline=10)
            assert bytes(lease.view) == CONTENT[5 * PART : 6 * PART]
        await pool.aclose()


async def test_a_store_whose_transfers_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays held, and the store is reached through another agent meanwhile: what is read
    there is right, and the agent that hung goes when its transfers have ended."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with linked() as (store, transport, link):
        hold = InFlight()
        buffer, other = buffer_from(bytearray(PART), hold), buffer_from(bytearray(PART))
        await link.read([Piece(0, 0, buffer)], deadline=10)
        await store.freeze()
        assert await outcome(link.read([Piece(PART, 0, buffer)], deadline=1)) is not None
        link.close()
        second = await transport.connect("a", "", store.answer)
        assert transport.agents == 2
        assert hold.in_flight == 1
        store.thaw()
        await second.read([Piece(2 * PART, 0, other)], deadline=30)
        assert seen(other) == CONTENT[2 * PART : 3 * PART]
        await idle(hold)
        assert seen(buffer) == CONTENT[PART : 2 * PART]
        for each in transport._workers:  # who waited for the end has been told
            await each.reactor.call(lambda agent: None)
        second.close()
        third = await transport.connect("a", "", store.answer)
        await third.read([Piece(3 * PART, 0, other)], deadline=10)
        assert seen(other) == CONTENT[3 * PART : 4 * PART]
        assert transport.agents == 1


async def test_a_store_that_hangs_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfers hold their share of the slab for ever; another store is written and read on."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with linked() as (store, transport, link), running_store(ARENA) as other:
        await link.read([Piece(0, 0, buffer_from(bytearray(PART)))], deadline=10)
        beside = await transport.connect("b", "", other.answer)
        data = hashlib.shake_256(b"new").digest(PART)
        await store.freeze()
        offsets = range(0, 12 * PART, PART)
        hung = [link.write([Piece(at, 0, buffer_from(data))], deadline=1) for at in offsets]
        results = await asyncio.gather(*map(outcome, hung))
        assert None not in results
        link.close()
        assert 0 < transport.quarantined_bytes <= 2 * PART
        for at in offsets:
            await beside.write([Piece(at, 0, buffer_from(data))], deadline=10)
        expected = hashlib.sha256(12 * data).hexdigest()
        assert await other.order("digest", 0, 12 * PART) == expected
        assert transport.quarantined_bytes > 0


async def test_a_greeting_that_is_given_up(transports: str) -> None:
    """Whoever connects goes away while NIXL gets to know the store: the next one gets his link."""
    async with linked() as (_, transport, _link), running_store(ARENA) as other:
        worker = transport._workers[0]
        for _ in range(3):
            busy = asyncio.ensure_future(worker.reactor.call(lambda agent: time.sleep(0.1)))
            given_up = asyncio.ensure_future(transport.connect("b", "", other.answer))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([busy, given_up])
            assert given_up.cancelled()
        both = [await transport.connect("b", "", other.answer) for _ in range(2)]
        for each in both:
            await each.read([Piece(PART, 0, buffer := buffer_from(bytearray(4096)))], deadline=10)
            assert seen(buffer) == CONTENT[PART : PART + 4096]


async def test_closing_over_a_hung_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing is bounded, tells who waits, and leaves the memory to what may still write it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with linked() as (store, transport, link):
        hold = InFlight()
        buffer = buffer_from(bytearray(PART), hold)
        await link.read([Piece(0, 0, buffer)], deadline=10)
        await store.freeze()
        waiting = asyncio.ensure_future(link.read([Piece(PART, 0, buffer)], deadline=30))
        await until(lambda: transport.in_flight > 0)
        async with asyncio.timeout(5):
            await transport.aclose()
        with pytest.raises(ClosedError):
            await waiting
        assert hold.in_flight == 1
        store.thaw()
        await idle(hold)
        assert seen(buffer) == CONTENT[PART : 2 * PART]

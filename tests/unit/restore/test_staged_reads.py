"""Read your writes: what waits to be stored is found, and read from where it waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import cacheflow.restore.writer
import cacheflow.tiers.staged
from cacheflow.kv import verify
from cacheflow.memory import buffer_from
from cacheflow.types import Extent, Read, Span, TransferStatus
from tests.unit.restore.saving import (
    CHUNKS,
    Gated,
    rig,
    until,
)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups wait for copies however slow the machine is."""
    monkeypatch.setattr(cacheflow.tiers.staged, "_PATIENCE", 20)


def read_of(info: Any, layers: Span) -> Read:
    offset, nbytes = info.layer_range(layers)
    return Read(info.key, offset, buffer_from(bytearray(nbytes)))


@pytest.mark.usefixtures("patient")
async def test_what_is_queued_is_found_and_read_and_later_comes_from_its_tier() -> None:
    """A lookup right after saving finds every chunk, and its reads deliver the sealed bytes,
    ranges too; a read that comes after the chunk was stored gets it from the tier."""
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}) as r:
        keys = await r.open("r")
        r.saver.save("r", keys)
        found = await r.staged.lookup(keys)
        assert [len(infos) for infos in found] == [1] * CHUNKS
        infos = [infos[0] for infos in found]
        layers = [Span(0, 4), Span(1, 3), Span(3, 4)]
        reads = [read_of(info, some) for info in infos for some in layers]
        for round_ in range(2):
            results = [result async for result in r.staged.load(reads)]
            assert [result.request for result in results] == reads
            assert {result.status for result in results} == {TransferStatus.OK}
            for read, (info, some) in zip(
                reads, [(info, some) for info in infos for some in layers], strict=True
            ):
                assert read.buffer.view is not None
                verify(info, some, read.buffer.view)
                read.buffer.view[:] = bytes(len(read.buffer.view))
            assert all(read.buffer.hold.in_flight == 0 for read in reads)
            for _ in range(CHUNKS):
                tier.gate.release()
            assert await r.saver.flush(20)
            assert tier.reads == round_ * len(reads)
        tier.objects.clear()
        [gone] = [result async for result in r.staged.load(reads[:1])]
        assert gone.status is TransferStatus.MISSING
        assert not any(await r.staged.lookup(keys))


@pytest.mark.usefixtures("patient")
async def test_a_copy_that_is_being_read_outlives_its_store() -> None:
    """Leaving a read of a queued chunk early, or storing the chunk meanwhile, gives the memory
    back once nobody copies out of it."""
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}) as r:
        keys = await r.open("r")
        r.saver.save("r", keys)
        infos = [infos[0] for infos in await r.staged.lookup(keys)]
        reads = [read_of(info, Span(0, 4)) for info in infos]
        results: Any = r.staged.load(reads)
        assert (await anext(results)).status is TransferStatus.OK
        for _ in range(CHUNKS):
            tier.gate.release()
        await results.aclose()
        await until(lambda: not any(read.buffer.hold.in_flight for read in reads))


@pytest.mark.usefixtures("patient")
async def test_what_is_queued_is_lent_and_later_loaded() -> None:
    """What waits is read where it lies, and stays there, though it is stored meanwhile, until it is
    given back; what has gone to its tier is not lent."""
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}) as r:
        keys = await r.open("r")
        r.saver.save("r", keys)
        infos = [infos[0] for infos in await r.staged.lookup(keys)]
        layers = [Span(0, 4), Span(1, 3)]
        extents = [Extent(i.key, *i.layer_range(some)) for i in infos for some in layers]
        loan = r.staged.borrow(extents)
        assert loan is not None
        for _ in range(CHUNKS):
            tier.gate.release()
        assert await r.saver.flush(20)
        assert r.staged_chunks == CHUNKS
        ranges = [(info, some) for info in infos for some in layers]
        for part, (info, some) in zip(loan.parts, ranges, strict=True):
            assert part.buffer is not None
            assert part.buffer.view is not None
            assert part.buffer.view.readonly
            verify(info, some, part.buffer.view)
        again = r.staged.borrow(extents[:1])
        loan.release()
        loan.release()
        assert r.staged_chunks == 1
        assert r.staged.borrow(extents[:3]) is None
        assert again is not None
        again.release()
        assert r.staged_chunks == 0
        assert r.staged.borrow(extents[:1]) is None
        assert tier.reads == 0

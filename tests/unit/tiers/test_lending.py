"""Loans through the guard and the tier: counted as loads are, and never evicted."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.kv import Stamp
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from cacheflow.testing.faults import FaultyBackend
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage import MemoryBackend
from cacheflow.testing.storage_harness import store_all
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.tiers.encoded import Encoded
from cacheflow.tiers.tier import Tier
from cacheflow.types import Codec, Extent, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cacheflow.abc import StorageBackend
    from cacheflow.types import Loan

OBJECTS = [make_object(number) for number in range(6)]
SIZE = len(OBJECTS[0].data)
MISSING, OK, REFUSED = TransferStatus.MISSING, TransferStatus.OK, TransferStatus.REFUSED


def extents(*numbers: int, nbytes: int = SIZE) -> list[Extent]:
    return [Extent(OBJECTS[number].key, 0, nbytes) for number in numbers]


def statuses(loan: Loan | None) -> list[TransferStatus]:
    assert loan is not None
    return [part.status for part in loan.parts]


def lent(tier: StorageBackend, wanted: list[Extent]) -> list[TransferStatus]:
    """How it went; given back at once."""
    loan = tier.borrow(wanted)
    assert loan is not None
    with loan:
        return statuses(loan)


@asynccontextmanager
async def guarded(failures: int = 3) -> AsyncIterator[tuple[Guarded, DramBackend]]:
    inner = await DramBackend.open({"capacity_bytes": 1 << 20})
    limits = HealthLimits(failures=failures, first_wait=1000.0, longest_wait=1000.0)
    tier = Guarded(inner, "memory", limits=limits)
    await store_all(tier, *OBJECTS[:3])
    yield tier, inner
    await tier.aclose()


async def test_what_cannot_be_lent_is_a_miss_from_then_on() -> None:
    """As with loads: not listed for a while, until it is stored anew."""
    async with guarded() as (tier, _):
        assert lent(tier, extents(0, 5)) == [OK, MISSING]
        assert lent(tier, extents(1, nbytes=SIZE + 1)) == [TransferStatus.SHORT]
        assert await tier.lookup([OBJECTS[1].key.chunk]) == [[]]
        await store_all(tier, OBJECTS[1])
        assert await tier.lookup([OBJECTS[1].key.chunk]) == [[OBJECTS[1].info]]


async def test_a_sick_tier_lends_nothing() -> None:
    """Loans that go wrong count against the tier as loads do; set aside, it is not asked at all."""
    async with guarded() as (tier, inner):
        for number in range(3):
            assert tier.reading.well
            tier.borrow(extents(number, nbytes=SIZE + 1))
        assert not tier.reading.well
        assert lent(tier, extents(0, 1)) == [REFUSED, REFUSED]
        assert tier.refused["load"] == 2
        assert lent(inner, extents(0)) == [OK]


async def test_loans_say_nothing_of_the_channel() -> None:
    """They take no time: the deadline of a load is what it was."""
    async with guarded() as (tier, _):
        before = tier._reads.begin(SIZE, 0.0)[1]
        for _ in range(100):
            lent(tier, extents(0, 1, 2))
        assert tier._reads.begin(SIZE, 0.0)[1] == before


@asynccontextmanager
async def shelf(objects: int) -> AsyncIterator[tuple[Tier, DramBackend]]:
    """A tier with room for so many objects, that leases nothing for longer than a moment."""
    inner = await DramBackend.open({"capacity_bytes": 1 << 20})
    settings = TierSettings(name="t", backend="dram", lease_seconds=1e-9)
    small = settings.model_copy(update={"capacity_bytes": objects * SIZE})
    tier = await Tier.over(inner, small)
    await tier.settle()
    yield tier, inner
    await tier.settle()
    known = {entry.key: entry.reads for entry in tier.catalogue}
    assert known == {info.key: 0 async for info in inner.scan()}
    assert tier.catalogue.bytes == await inner.used_bytes()
    await tier.aclose()


async def test_what_is_lent_is_not_evicted() -> None:
    """However much is stored; given back, it may go."""
    async with shelf(objects=2) as (tier, _):
        await store_all(tier, *OBJECTS[:2])
        loan = tier.borrow(extents(0, 1))
        assert statuses(loan) == [OK, OK]
        [result] = await tier.store([OBJECTS[2].write()])
        assert result.status is TransferStatus.FULL
        assert loan is not None
        loan.release()
        loan.release()
        await store_all(tier, *OBJECTS[3:5])
        assert await tier.lookup([OBJECTS[0].key.chunk, OBJECTS[4].key.chunk]) == [
            [],
            [OBJECTS[4].info],
        ]


async def test_lent_and_deleted_and_stored_again() -> None:
    """Giving back what was deleted meanwhile does not unlock what has come in its place."""
    async with shelf(objects=2) as (tier, _):
        await store_all(tier, *OBJECTS[:2])
        old = tier.borrow(extents(0))
        await tier.delete([OBJECTS[0].key])
        await store_all(tier, OBJECTS[0])
        new = tier.borrow(extents(0, 1))
        assert old is not None
        assert new is not None
        old.release()
        [result] = await tier.store([OBJECTS[2].write()])
        assert result.status is TransferStatus.FULL
        new.release()


async def test_what_is_not_there_leaves_the_index() -> None:
    """An object that went behind the tier's back is gone when somebody wants to borrow it."""
    async with shelf(objects=2) as (tier, inner):
        await store_all(tier, *OBJECTS[:2])
        await inner.delete([OBJECTS[0].key])
        loan = tier.borrow(extents(0, 1))
        assert statuses(loan) == [MISSING, OK]
        assert [entry.key for entry in tier.catalogue] == [OBJECTS[1].key]
        assert loan is not None
        loan.release()


@pytest.mark.parametrize(
    "over",
    [
        lambda inner: ThrottledBackend(inner, Link()),
        lambda inner: FaultyBackend(inner),
        lambda inner: Encoded(inner, Codec.ZSTD, Stamp()),
        lambda inner: Guarded(ThrottledBackend(inner, Link()), "link"),
    ],
    ids=["throttled", "faulty", "encoded", "guarded link"],
)
async def test_what_delays_or_alters_does_not_lend(
    over: Callable[[StorageBackend], StorageBackend],
) -> None:
    """Decorators that would be passed by do not lend, whatever is behind them."""
    inner = await DramBackend.open({"capacity_bytes": 1 << 20})
    await store_all(inner, OBJECTS[0])
    tier = over(inner)
    assert tier.borrow(extents(0)) is None
    await tier.aclose()
    await inner.aclose()


async def test_a_store_that_lends_nothing_is_not_judged() -> None:
    """A tier over a store without memory of its own says so, and nothing else happens."""
    inner = MemoryBackend()
    tier = await Tier.over(Guarded(inner, "t"), TierSettings(name="t", backend="any"))
    await store_all(tier, OBJECTS[0])
    assert tier.borrow(extents(0, 5)) is None
    assert await tier.lookup([OBJECTS[0].key.chunk]) == [[OBJECTS[0].info]]
    assert [entry.reads for entry in tier.catalogue] == [0]
    await tier.aclose()

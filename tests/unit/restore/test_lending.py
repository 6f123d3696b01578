"""Restores from a tier that lends: straight from its memory, and never from what has left it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import chunk_keys, key_root, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.restore.transfer import verify_pieces
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend, DramOptions
from cacheflow.testing.engine import FakeEngine
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.tiers.tier import Tier
from cacheflow.types import Codec, Lent, LoadEnded, LoadOutcome, Loan, ObjectKey, Span, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cacheflow.restore import Restoration
    from cacheflow.types import Event, Extent, StagedPart

TOKENS = [(7 * i) % 101 for i in range(500)]
CHUNKS = 31
ROOM = 4 << 20


class Lender(DramBackend):
    """``before_borrow`` is called first; ``alter`` makes something else of a loan."""

    def __init__(self, options: DramOptions) -> None:
        super().__init__(options)
        self.before_borrow: Callable[[Sequence[Extent]], object] = len
        self.alter: Callable[[Loan], Loan] = _as_it_is
        self.lent = 0

    def borrow(self, extents: Sequence[Extent]) -> Loan:
        self.before_borrow(extents)
        self.lent += len(extents)
        return self.alter(super().borrow(extents))

    def flip(self, key: ObjectKey) -> None:
        found = self._find(key)
        assert found is not None
        found.lease.view[-1] ^= 1


def _as_it_is(loan: Loan) -> Loan:
    return loan


class Rig:
    """An engine that checks every byte, and a tier over memory that is lent."""

    def __init__(self, store: Lender, tier: Tier, staging: int) -> None:
        self.engine, self.store, self.tier = FakeEngine(), store, tier
        self.pool = StagingPool(staging)
        self.ended: list[LoadEnded] = []
        self.restorer = Restorer(
            self.engine,
            BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock()),
            {"memory": tier},
            self.pool,
            observer=self._hear,
        )
        self.keys = chunk_keys(key_root({"model": "fake"}), TOKENS, self.engine.layout.chunk_tokens)

    def _hear(self, event: Event) -> None:
        if isinstance(event, LoadEnded):
            self.ended.append(event)

    async def fill(self, codec: Codec = Codec.RAW) -> None:
        for chunk in range(CHUNKS):
            write = await asyncio.to_thread(self.write_of, chunk, codec)
            [result] = await self.tier.store([write])
            assert result.status == "ok", result

    def write_of(self, chunk: int, codec: Codec = Codec.RAW) -> Write:
        layout = self.engine.layout
        blocks = (self.engine.expected(TOKENS, chunk, n) for n in range(layout.num_layers))
        payload = memoryview(bytearray(b"".join(blocks)))
        key = self.object_key(chunk)
        info, header = seal(
            key, layout, payload, grid_id="", segments=(), canonical=False, codec=codec
        )
        stored = payload[: info.nbytes - info.payload_offset]
        return Write(info, (buffer_from(header), buffer_from(stored)))

    def object_key(self, chunk: int) -> ObjectKey:
        layout = self.engine.layout
        return ObjectKey(self.keys[chunk], Span(0, layout.num_layers), Span(0, layout.num_kv_heads))

    async def restore(self) -> Restoration:
        """By loading whatever can be loaded; every byte is checked."""
        await self.engine.open("r", TOKENS)
        try:
            async with asyncio.timeout(20):
                result = await self.run()
            assert self.engine.wrong_cells("r", len(TOKENS)) == []
            return result
        finally:
            await self.engine.close("r")

    async def run(self) -> Restoration:
        request = RestoreRequest("r", TOKENS, self.keys, self.restorer.clock.now())
        return await self.restorer.run(request, load_policy("load"))

    def outcomes(self) -> set[LoadOutcome]:
        return {event.outcome for event in self.ended}

    async def assert_all_is_given_back(self) -> None:
        """No hold, no lease: once everything is deleted all memory is free."""
        assert self.pool.leased_bytes == self.pool.quarantined_bytes() == 0
        assert all(entry.reads == 0 for entry in self.tier.catalogue)
        await self.tier.delete([self.object_key(chunk) for chunk in range(CHUNKS)])
        assert self.store._arena.free_bytes == self.store._arena.capacity


@asynccontextmanager
async def rig(staging: int = 4096) -> AsyncIterator[Rig]:
    """With a page of staging memory: nothing raw would find room there."""
    store = await Lender.open({"capacity_bytes": ROOM})
    settings = TierSettings(name="memory", backend="dram")
    guarded = Guarded(store, "memory", limits=HealthLimits(failures=1000))
    tier = await Tier.over(guarded, settings)
    made = Rig(store, tier, staging)
    async with made.restorer:
        yield made
        await made.assert_all_is_given_back()
    await tier.aclose()
    await made.pool.aclose()
    made.engine.shutdown()


async def test_nothing_is_staged() -> None:
    """A restore of megabytes needs no staging memory, and is right to the byte."""
    async with rig() as r:
        await r.fill()
        result = await r.restore()
        assert result.recomputed_cells == 0
        assert r.store.lent > 0
        assert r.outcomes() == {LoadOutcome.PUBLISHED}


async def test_what_is_encoded_is_decoded_into_staging_memory() -> None:
    """Chunks that were stored encoded are lent as they are; only what comes out is staged."""
    async with rig(staging=1 << 20) as r:
        await r.fill(Codec.ZSTD)
        await r.fill(Codec.INT8)  # what this codec cannot take stays raw or zstd: both are lent
        assert (await r.restore()).recomputed_cells == 0
        assert r.store.lent > 0


async def test_what_is_corrupt_is_recomputed() -> None:
    """Lent bytes are verified like any others; the tier is told and deletes them."""
    async with rig() as r:
        await r.fill()
        r.store.flip(r.object_key(CHUNKS - 1))
        result = await r.restore()
        assert result.recomputed_cells > 0
        assert LoadOutcome.CORRUPT in r.outcomes()
        await r.tier.settle()
        assert await r.tier.lookup([r.keys[CHUNKS - 1]]) == [[]]


async def test_what_was_listed_and_is_gone_is_recomputed() -> None:
    """An object deleted between lookup and loan is a missing one, in the index too."""
    async with rig() as r:
        await r.fill()
        gone = r.object_key(CHUNKS - 1)
        r.store.before_borrow = lambda extents: r.store._remove(gone)
        result = await r.restore()
        assert result.recomputed_cells > 0
        assert LoadOutcome.MISSING in r.outcomes()
        assert r.tier.catalogue.find(gone) is None


def _raise(extents: Sequence[Extent]) -> None:
    raise ValueError("a bug")


def _short(loan: Loan) -> Loan:
    loan.release()
    return Loan(loan.parts[1:])


def _refused(loan: Loan) -> Loan:
    loan.release()
    return Loan([Lent(part.extent, "refused") for part in loan.parts])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hook", "value"), [("before_borrow", _raise), ("alter", _short), ("alter", _refused)]
)
async def test_a_lender_that_breaks_its_word_costs_its_loads(hook: str, value: Any) -> None:
    """Whatever comes of asking for a loan, the request is restored."""
    async with rig() as r:
        await r.fill()
        setattr(r.store, hook, value)
        assert (await r.restore()).recomputed_share == 1.0


async def test_bytes_stay_until_they_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is deleted and its memory stored over while it is being copied into the KV cache:
    what arrives there is what was verified."""
    async with rig() as r:
        await r.fill()
        publish, busy = r.engine.publish, asyncio.Lock()

        async def slow(request_id: str, parts: Sequence[StagedPart]) -> None:
            async with busy:
                keys = [r.object_key(chunk) for chunk in range(CHUNKS)]
                await r.tier.delete(keys)
                for chunk in range(CHUNKS):
                    other = replace(r.write_of(0), info=r.write_of(chunk).info)
                    await r.tier.store([other])
                await publish(request_id, parts)

        monkeypatch.setattr(r.engine, "publish", slow)
        await r.restore()
        assert LoadOutcome.PUBLISHED in r.outcomes()


@pytest.mark.parametrize("stage", ["verify", "publish"])
async def test_a_cancelled_restore_gives_back(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while a thread reads what is lent: it is given back when that thread is done with
    it, and before the restore has ended."""
    loop, began, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def wait() -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(20)

    async with rig() as r:
        await r.fill()
        if stage == "verify":

            def watched(*arguments: Any) -> None:
                wait()
                verify_pieces(*arguments)

            monkeypatch.setattr("cacheflow.restore.loads.verify_pieces", watched)
        else:
            write_back = r.engine._write_back

            def slow(*arguments: Any) -> None:
                wait()
                write_back(*arguments)

            monkeypatch.setattr(r.engine, "_write_back", slow)
        await r.engine.open("r", TOKENS)
        running = asyncio.ensure_future(r.run())
        await began.wait()
        running.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        await r.tier.delete([r.object_key(chunk) for chunk in range(CHUNKS)])
        assert r.store._arena.free_bytes < r.store._arena.capacity
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await r.engine.close("r")

"""A backend whose own tasks are cancelled lets CancelledError out, which nobody has asked for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from cacheflow import CacheFlow, Generation, Settings
from cacheflow.tasks import no_strays
from cacheflow.testing.serving import ServingEngine, next_token
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Guarded
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo, ChunkKey, Read, StorePart, TransferResult, Write

MANY = 200
"""Loads: the same one again and again."""
PROMPT = [(7 * at) % 1000 for at in range(300)]


async def stray() -> None:
    """What a client does whose connection is closed under a request."""
    task = asyncio.ensure_future(asyncio.sleep(3600))
    task.cancel()
    await task


class Straying(MemoryBackend):
    """``sick``: the operations that do."""

    def __init__(self, *sick: str) -> None:
        super().__init__()
        self.sick = sick
        self.loads = 0

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        if "lookup" in self.sick:
            await stray()
        return await super().lookup(keys)

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self.loads += 1
        if "load" in self.sick and self.loads < MANY:
            await stray()
        async for result in super().load(reads):
            yield result

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        if "store" in self.sick:
            await stray()
        return await super().store(writes)

    async def aclose(self) -> None:
        if "close" in self.sick:
            await stray()
        await super().aclose()

    def parts(self) -> Sequence[StorePart]:
        raise RuntimeError("nobody knows")


async def ask(flow: CacheFlow, report: Generation) -> None:
    """A turn that gets the right tokens; all of it is settled afterwards."""
    session = flow.session("s")
    made = [t async for t in session.generate(PROMPT, max_new_tokens=2, report=report)]
    assert made == [next_token(PROMPT), next_token([*PROMPT, made[0]])]
    assert await flow.flush(20)
    await session.forget()
    await until(lambda: not flow.restorer.pool.leased_bytes)


@pytest.mark.parametrize("policy", ["adaptive", "load"])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
async def test_it_is_a_failure_of_the_backend(operation: str, guarded: bool, policy: str) -> None:
    """The request is right, saves are settled, the same load is not begun for ever, and the tier is
    used again when it is well."""
    engine, inner = ServingEngine(), Straying()
    tier: StorageBackend = Guarded(inner, "t") if guarded else inner
    settings = Settings(staging_bytes=1 << 24, keep_costs=False, policy=policy, flush_seconds=0)
    async with CacheFlow.open(settings, engine=engine, backends={"t": tier}) as flow:
        if operation != "store":
            await ask(flow, Generation())
            assert inner.objects
        inner.sick = (operation,)
        for _ in range(2):
            await ask(flow, Generation())
        inner.sick = ()
        assert inner.loads < MANY
        report = Generation()
        if not guarded:
            await ask(flow, report)
            assert report.saved is not None
            assert report.saved["t"].dropped == 0
            assert inner.objects
    await tier.aclose()
    engine.shutdown()


async def test_the_guard_makes_an_error_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """Of every operation, so that the tier's health learns of it; closing ends well."""
    inner = Straying("lookup", "close")
    guard = Guarded(inner, "t")
    with pytest.raises(RuntimeError, match="cancelled from within"):
        await guard.lookup(())
    assert guard.reading.counts
    assert guard.parts() == ()
    with caplog.at_level(logging.ERROR):
        await guard.aclose()
    assert "tier t: closing it failed" in caplog.text


async def test_a_cancellation_that_is_meant_stays_one() -> None:
    """Also where a deadline has cancelled."""

    async def call() -> None:
        with no_strays():
            await asyncio.sleep(3600)

    task = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await call()

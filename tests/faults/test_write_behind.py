"""Sessions over stores that are slow to take what was generated: nothing waits, nothing is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cacheflow.kv import decode_header
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.staged import STAGED_CHANNEL
from cacheflow.types import StoreEnded, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from cacheflow.types import Event, TransferResult, Write

CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)


class Slow(MemoryBackend):
    """Stores wait until :attr:`opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        await self.opened.wait()
        return await super().store(writes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


@asynccontextmanager
async def opened(
    folder: Path, backends: dict[str, Any], **settings: Any
) -> AsyncIterator[tuple[CacheFlow, list[Event]]]:
    """Afterwards no staging memory, turn or KV is left."""
    events: list[Event] = []
    engine: Any = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    try:
        async with CacheFlow.open(
            Settings(**{"staging_bytes": 1 << 23, **settings}),
            engine=engine,
            backends=backends,
            observer=events.append,
        ) as flow:
            yield flow, events
        assert flow.restorer.pool.leased_bytes == 0
        assert flow.restorer.pool.quarantined_bytes() == 0
        assert len(flow.saver._turns) == 0
        assert engine.kv_used_bytes == 0
    finally:
        await engine.aclose()


async def ask(
    flow: CacheFlow, name: str, prompt: list[int], new: int = 4, **options: Any
) -> tuple[list[int], Generation]:
    report = Generation()
    stream = flow.session(name).generate(prompt, max_new_tokens=new, report=report, **options)
    return [token async for token in stream], report


async def test_another_session_reads_what_is_queued(model_folder: Path) -> None:
    """While the only tier takes nothing, a turn ends, is forgotten, and another session with the
    same prefix restores all of it from where it waits, to the same tokens; so does a third that
    began before the chunks were stored and goes on after that."""
    store = Slow()
    prompt = prompt_of(300)
    async with opened(model_folder, {"s": store}) as (flow, _):
        cold, first = await ask(flow, "cold", prompt, policy="recompute")
        await flow.session("cold").forget()
        assert first.saved is not None
        assert first.saved["s"].pending == 18
        warm, second = await ask(flow, "fork", prompt, policy="load", save=False)
        assert warm == cold
        assert second.restoration is not None
        assert second.restoration.loaded_cells == {STAGED_CHANNEL: 288 * 3}
        assert second.restoration.recomputed_share == 0
        assert store.objects == {}
        again = asyncio.create_task(ask(flow, "late", prompt, policy="load", save=False))
        await asyncio.sleep(0)
        store.opened.set()
        assert (await again)[0] == cold
        assert await flow.flush(20)
        assert first.saved["s"].stored == 18
        stored, third = await ask(flow, "stored", prompt, policy="load", save=False)
        assert stored == cold
        assert third.restoration is not None
        assert third.restoration.loaded_cells == {"s": 288 * 3}


async def test_forgotten_at_once_nothing_is_lost_while_the_tier_takes_it(
    model_folder: Path,
) -> None:
    """Far less room than the conversation needs, forgotten right after its last token: what does
    not fit waits for the tier; all of it is stored, and right."""
    prompt = prompt_of(900)
    store = MemoryBackend()
    async with opened(model_folder, {"s": store}, staging_bytes=1 << 20) as (flow, _):
        cold, report = await ask(flow, "s", prompt, policy="recompute")
        await flow.session("s").forget()
        assert flow.session("s").resident_tokens == 0
        assert await flow.flush(20)
        assert report.saved is not None
        assert report.saved["s"].stored == 56
        assert (await ask(flow, "t", prompt, policy="load"))[0] == cold


async def test_a_turn_that_goes_elsewhere_does_not_wait_for_a_hung_tier(
    model_folder: Path,
) -> None:
    """The next prompt does not extend the last one, whose chunks find no room: they are dropped
    and counted, and the turn is answered as if there was no tier."""
    store = Slow()
    async with opened(model_folder, {"s": store}, staging_bytes=1 << 20, flush_seconds=0.05) as (
        flow,
        events,
    ):
        expected, _ = await ask(flow, "alone", prompt_of(300, seed=1), save=False)
        _, report = await ask(flow, "s", prompt_of(900))
        async with asyncio.timeout(20):
            tokens, _ = await ask(flow, "s", prompt_of(300, seed=1), save=False)
        assert tokens == expected
        assert report.saved is not None
        saved = report.saved["s"]
        assert saved.dropped > 0
        assert saved.pending > 0
        assert saved.pending + saved.dropped == 56
    assert saved.dropped == 56
    reasons = {e.outcome for e in events if isinstance(e, StoreEnded)}
    assert reasons == {"forgotten", "closed"}


def payloads(store: MemoryBackend) -> dict[Any, bytes]:
    infos = {key: decode_header(memoryview(data)) for key, data in store.objects.items()}
    return {key: bytes(data[infos[key].payload_offset :]) for key, data in store.objects.items()}


async def test_what_a_slow_tier_delivered_is_promoted(model_folder: Path) -> None:
    """Chunks loaded from the slower tier are copied to the faster one behind the request, bit for
    bit, even if the turn itself is not saved, and without reading them again. (Their history is
    that of the restore: behind the grid's tiles it is not known any more.)"""
    fast, slow = MemoryBackend(), MemoryBackend()
    prompt = prompt_of(300)
    async with opened(model_folder, {"fast": fast, "slow": slow}) as (flow, _):
        cold, _ = await ask(flow, "a", prompt, policy="recompute")
        await flow.flush()
        await flow.forget()
        kept = payloads(fast)
        for key in list(fast.objects)[:10]:
            del fast.objects[key]
        warm, report = await ask(flow, "b", prompt, policy="load", save=False)
        reads = slow.reads
        assert warm == cold
        assert report.restoration is not None
        assert report.restoration.loaded_cells.keys() == {"fast", "slow"}
        assert await flow.flush(20)
        assert payloads(fast) == kept
        assert slow.reads == reads

"""Promise 1: what comes back is, bit for bit, what the run that never forgot has."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import canonical_tokens, decode_header
from cacheflow.memory import StagingPool
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.testing.storage import MemoryBackend
from cacheflow.testing.vault import Vault
from cacheflow.types import Span, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cacheflow.abc import StorageBackend

LAYERS = 4
CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)
PREFIX = 384
"""Five whole tiles."""
DTYPES = ["float32", "bfloat16", "float16"]


@asynccontextmanager
async def opened(folder: Path, dtype: str = "float32") -> AsyncIterator[TransformersEngine]:
    engine = await TransformersEngine.open_model(
        folder, dtype=dtype, grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    try:
        yield engine
    finally:
        await engine.aclose()


async def continuation(engine: Any, request_id: str, count: int = 8) -> list[int]:
    token = await engine.first_token(request_id)
    tokens = [token]
    for _ in range(count - 1):
        (token,) = await engine.decode([request_id], [token])
        tokens.append(token)
    return tokens


class Bench:
    """A cold run kept aside, and restores of it from any set of stored cells."""

    def __init__(self, engine: Any, tokens: list[int], vault: Vault, cold: list[int]) -> None:
        self.engine = engine
        self.tokens = tokens
        self.vault = vault
        self.cold = cold
        self.runs = 0

    @classmethod
    async def make(cls, engine: Any, seed: int = 0) -> Bench:
        chance = random.Random(seed)
        tokens = [chance.randrange(320) for _ in range(PREFIX + 9)]
        await engine.open("cold", tokens)
        # The same pieces that a restore uses: whole chunks, then the suffix.
        pool = StagingPool(1 << 22)
        scheduler = BatchScheduler(ComputeModel(*engine.layer_flops), SystemClock())
        async with Restorer(engine, scheduler, {"none": MemoryBackend()}, pool) as restorer:
            keys = (await Vault.take(engine, "cold", tokens)).keys
            request = RestoreRequest("cold", tokens, keys, 0.0)
            done = await restorer.run(request, load_policy("recompute"))
        engine.set_segments("cold", Span(0, PREFIX), done.segments)
        vault = await Vault.take(engine, "cold", tokens)
        cold = await continuation(engine, "cold")
        await engine.close("cold")
        return cls(engine, tokens, vault, cold)

    async def restore(self, store: StorageBackend, policy: str, staging: int = 1 << 22) -> None:
        """Restore from ``store``; every byte and every token must be the cold run's."""
        self.runs += 1
        name = f"run-{self.runs}"
        await self.engine.open(name, self.tokens)
        pool = StagingPool(staging)
        scheduler = BatchScheduler(ComputeModel(*self.engine.layer_flops), SystemClock())
        async with Restorer(self.engine, scheduler, {"store": store}, pool) as restorer:
            request = RestoreRequest(name, self.tokens, self.vault.keys, 0.0)
            await restorer.run(request, load_policy(policy))
        again = await Vault.take(self.engine, name, self.tokens)
        assert self.vault.differing_bytes(again, PREFIX // CHUNK) == 0
        assert await continuation(self.engine, name) == self.cold
        await self.engine.close(name)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_every_meeting_point_is_bit_equal(model_folder: Path, dtype: str) -> None:
    """Recompute up to any layer of any tile, load the rest: 0 differing bytes, same tokens."""
    async with opened(model_folder, dtype) as engine:
        bench = await Bench.make(engine)
        for tile in GRID.split(0, PREFIX):
            for layer in range(LAYERS + 1):
                store = MemoryBackend()
                for chunk in range(tile.start // CHUNK, PREFIX // CHUNK):
                    inside = chunk < tile.stop // CHUNK
                    if inside and layer == LAYERS:
                        continue
                    layers = Span(layer if inside else 0, LAYERS)
                    await bench.vault.put(store, chunk, layers)
                await bench.restore(store, "load")


@pytest.mark.parametrize("dtype", DTYPES)
async def test_random_holes_are_bit_equal(model_folder: Path, dtype: str) -> None:
    """Any subset of (chunk, layer range) missing, under every policy: 0 differing bytes."""
    chance = random.Random(11)
    async with opened(model_folder, dtype) as engine:
        bench = await Bench.make(engine, seed=3)
        for _ in range(25):
            store = MemoryBackend()
            for chunk in range(PREFIX // CHUNK):
                cut = chance.randrange(1, LAYERS)
                for layers in (Span(0, cut), Span(cut, LAYERS)):
                    if chance.random() < 0.7:
                        await bench.vault.put(store, chunk, layers)
            await bench.restore(store, chance.choice(["load", "adaptive"]))


async def test_what_a_tier_lends_is_bit_equal(model_folder: Path) -> None:
    """Straight from a memory tier's own bytes, with holes and flipped bits, and a page of staging
    memory: 0 differing bytes, and what was lent is as it was."""
    chance = random.Random(7)
    async with opened(model_folder, "bfloat16") as engine:
        bench = await Bench.make(engine, seed=5)
        for _ in range(6):
            store = await DramBackend.open({"capacity_bytes": 16 << 20})
            for chunk in range(PREFIX // CHUNK):
                if chance.random() < 0.8:
                    await bench.vault.put(store, chunk)
            for info in [info async for info in store.scan()]:
                if chance.random() < 0.1:
                    found = store._find(info.key)
                    assert found is not None
                    found.lease.view[chance.randrange(4096, info.nbytes)] ^= 1
            before = bytes(store._arena.view)
            await bench.restore(store, chance.choice(["load", "adaptive"]), staging=4096)
            assert bytes(store._arena.view) == before
            await store.aclose()


async def test_corrupt_late_and_failed_loads_are_bit_equal(model_folder: Path) -> None:
    """Flipped bits and vanished objects in the middle of a restore change nothing."""
    chance = random.Random(5)
    async with opened(model_folder) as engine:
        bench = await Bench.make(engine, seed=4)
        for _ in range(10):
            store = MemoryBackend()
            for chunk in range(PREFIX // CHUNK):
                await bench.vault.put(store, chunk)
            for data in store.objects.values():
                if chance.random() < 0.3:
                    data[chance.randrange(4096, len(data))] ^= 1 << chance.randrange(8)

            async def meddle(read: Any, store: MemoryBackend = store) -> None:
                if chance.random() < 0.2:
                    store.objects.pop(read.key, None)
                await asyncio.sleep(0)

            store.before_read = meddle
            await bench.restore(store, "load")


async def test_a_conversation_that_forgets_every_turn(model_folder: Path) -> None:
    """Several turns, forgotten and restored with holes each time, beside one that never forgets.

    Loaded chunks equal what was stored, canonical ones equal the run that never forgot, and every
    turn's greedy tokens are equal.
    """
    chance = random.Random(1)
    async with opened(model_folder) as engine:
        store = MemoryBackend()
        settings = Settings(tiers=[], staging_bytes=1 << 22)
        async with (
            CacheFlow.open(settings, engine=engine, backends={"store": store}) as flow,
            CacheFlow.open(settings, engine=engine, backends={}) as apart,
        ):
            # Of two CacheFlows, or the one that forgets would share what the other has in memory.
            never, forgets = apart.session("never"), flow.session("forgets")
            history = [chance.randrange(320) for _ in range(150)]
            for turn in range(5):
                report = Generation()
                expected = [t async for t in never.generate(history, max_new_tokens=12, save=False)]
                stored = {key: bytes(data) for key, data in store.objects.items()}
                got = [t async for t in forgets.generate(history, max_new_tokens=12, report=report)]
                await flow.flush()
                assert got == expected, f"turn {turn}"
                assert report.restoration is not None
                assert (report.cached_tokens > 0) == (turn > 0)
                for key, data in stored.items():
                    now = bytes(store.objects[key])
                    became = decode_header(now).canonical and not decode_header(data).canonical
                    assert now == data or became, "only a canonical copy replaces another"
                (ours,), (theirs,) = forgets.requests, never.requests
                canonical = min(_canonical(engine, ours), _canonical(engine, theirs))
                assert canonical >= 128
                for layer in range(LAYERS):
                    for mine, other in zip(
                        engine.kv(ours, layer, canonical),
                        engine.kv(theirs, layer, canonical),
                        strict=True,
                    ):
                        assert torch.equal(mine, other)
                await forgets.forget()
                for key in chance.sample(sorted(store.objects), len(store.objects) // 4):
                    del store.objects[key]
                history += [*got, *(chance.randrange(320) for _ in range(chance.randrange(60)))]


def _canonical(engine: Any, request_id: str) -> int:
    return canonical_tokens(engine.segments(request_id), engine.grid)


async def test_a_canonical_copy_replaces_another_and_is_never_replaced(model_folder: Path) -> None:
    """Chunks first stored from decoding are replaced by a grid prefill, not the other way round."""
    async with opened(model_folder) as engine:
        store = MemoryBackend()
        settings = Settings(tiers=[], staging_bytes=1 << 22)
        async with CacheFlow.open(settings, engine=engine, backends={"store": store}) as flow:
            prompt = list(range(20))
            made = [t async for t in flow.session("a").generate(prompt, max_new_tokens=60)]
            await flow.flush()
            infos = [info async for info in store.scan()]
            assert not any(info.canonical for info in infos)
            whole = [*prompt, *made][:70]
            [
                t
                async for t in flow.session("b").generate(
                    whole, max_new_tokens=1, policy="recompute"
                )
            ]
            await flow.flush()
            kept = [info async for info in store.scan()]
            assert sum(info.canonical for info in kept) == 4
            assert {i.key for i in kept} >= {i.key for i in infos}
            await flow.forget()
            [t async for t in flow.session("c").generate(prompt, max_new_tokens=60)]
            await flow.flush()
            assert [info async for info in store.scan()] == kept

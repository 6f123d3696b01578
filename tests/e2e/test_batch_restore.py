"""Several restores at once through one restorer: holes, a cancellation, a dead tier, no leaks."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.errors import BackendError
from cacheflow.memory import StagingPool
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import POLICIES, BatchScheduler, load_policy
from cacheflow.testing.storage import MemoryBackend
from cacheflow.testing.vault import Vault
from cacheflow.types import Span, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from cacheflow.types import ChunkKey, Event, Read

LAYERS = 4
CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)
LENGTHS = (384, 64, 256, 128, 512, 384)
"""Prefixes that end with a tile, so that every tile repeats bit for bit."""
SHARED = 128
"""Leading tokens that the requests have in common where they share a prefix."""
VICTIM, DEAD = 0, 2
"""The request that is cancelled, and the one whose tier fails."""


@dataclass
class Cold:
    """A run that never forgot: its KV by layer and its first token."""

    tokens: list[int]
    vault: Vault
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    first: int = -1

    @property
    def prefix(self) -> int:
        return len(self.tokens) // CHUNK * CHUNK


def prompts(chance: random.Random, *, shared: bool) -> list[list[int]]:
    common = [chance.randrange(320) for _ in range(SHARED)]
    made = []
    for length in LENGTHS:
        own = [chance.randrange(320) for _ in range(length + 9)]
        made.append([*common[:length], *own[min(SHARED, length) :]] if shared else own)
    return made


async def run_cold(engine: Any, tokens: list[int], pool: StagingPool) -> Cold:
    await engine.open("cold", tokens)
    scheduler = BatchScheduler(ComputeModel(*engine.layer_flops), SystemClock())
    async with Restorer(engine, scheduler, {}, pool) as restorer:
        keys = (await Vault.take(engine, "cold", tokens)).keys
        done = await restorer.run(
            RestoreRequest("cold", tokens, keys, 0.0), load_policy("recompute")
        )
    prefix = len(tokens) // CHUNK * CHUNK
    engine.set_segments("cold", Span(0, prefix), done.segments)
    cold = Cold(tokens, await Vault.take(engine, "cold", tokens))
    cold.kv = [engine.kv("cold", layer, prefix) for layer in range(LAYERS)]
    cold.first = await engine.first_token("cold")
    await engine.close("cold")
    return cold


class Batch:
    """Six requests, the store that has most of their KV, and one restorer for all."""

    def __init__(self, engine: Any, colds: Sequence[Cold], pool: StagingPool) -> None:
        self.engine = engine
        self.colds = colds
        self.pool = pool
        self.store = MemoryBackend()
        self.events: list[Event] = []
        scheduler = BatchScheduler(ComputeModel(*engine.layer_flops), SystemClock())
        self.restorer = Restorer(
            engine, scheduler, {"store": self.store}, pool, observer=self.observe
        )
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.cancel_at = 0
        """Cancel the victim at its n-th event (0: never)."""
        self._seen = 0

    def observe(self, event: Event) -> None:
        self.events.append(event)
        if getattr(event, "request_id", "") == f"r{VICTIM}" and self.cancel_at:
            self._seen += 1
            if self._seen == self.cancel_at:
                self.tasks[f"r{VICTIM}"].cancel()

    async def fill(self, chance: random.Random, kept: float) -> None:
        """Each of two layer shards of each chunk is there with probability ``kept``."""
        for cold in self.colds:
            for chunk in range(len(cold.vault.keys)):
                cut = chance.randrange(1, LAYERS)
                for layers in (Span(0, cut), Span(cut, LAYERS)):
                    if chance.random() < kept:
                        await cold.vault.put(self.store, chunk, layers)

    def fail_reads_of(self, keys: Sequence[ChunkKey]) -> None:
        """From the second read on, the tier fails whatever those chunks are read for."""
        wanted, reads = set(keys), 0

        async def fail(read: Read) -> None:
            nonlocal reads
            if read.key.chunk in wanted:
                reads += 1
                if reads > 1:
                    raise BackendError("gone", operation="load", context="test")

        self.store.before_read = fail

    async def restore(self, policies: Iterator[str]) -> dict[str, Any]:
        """All at once; what each came to (a restoration or an exception), by request."""
        for i, cold in enumerate(self.colds):
            await self.engine.open(f"r{i}", cold.tokens)
        async with self.restorer:
            for i, cold in enumerate(self.colds):
                request = RestoreRequest(f"r{i}", cold.tokens, cold.vault.keys, i * 1e-6)
                running = self.restorer.run(request, load_policy(next(policies)))
                self.tasks[f"r{i}"] = asyncio.create_task(running)
            async with asyncio.timeout(60):
                results = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return dict(zip(self.tasks, results, strict=True))

    async def check_equal(self, request_id: str, cold: Cold) -> None:
        """Every cell of the prefix and the first token are those of the cold run."""
        for layer in range(LAYERS):
            mine = self.engine.kv(request_id, layer, cold.prefix)
            for ours, theirs in zip(mine, cold.kv[layer], strict=True):
                assert torch.equal(ours, theirs), (request_id, layer)
        assert await self.engine.first_token(request_id) == cold.first

    async def check_no_leaks(self, tasks: set[asyncio.Task[Any]]) -> None:
        """No lease, hidden state, task or page is left once the requests are closed."""
        assert asyncio.all_tasks() == tasks
        assert self.pool.leased_bytes == self.pool.quarantined_bytes() == 0
        for i in range(len(self.colds)):
            pages = self.engine._requests.get(f"r{i}").pages
            assert not any(page.paused for page in pages), f"r{i}"
            await self.engine.close(f"r{i}")
        assert self.engine.kv_used_bytes == 0


@asynccontextmanager
async def batch(
    folder: Path, chance: random.Random, *, shared: bool, kept: float
) -> AsyncIterator[Batch]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    pool = StagingPool(1 << 22)
    try:
        colds = [await run_cold(engine, tokens, pool) for tokens in prompts(chance, shared=shared)]
        made = Batch(engine, colds, pool)
        await made.fill(chance, kept)
        yield made
    finally:
        await engine.aclose()
        await pool.aclose()


def mixed(chance: random.Random) -> Iterator[str]:
    """Any policy there is, one a request."""
    while True:
        yield chance.choice(sorted(POLICIES))


@pytest.mark.parametrize("shared", [False, True], ids=["distinct", "shared"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_a_batch_with_holes_is_bit_equal(
    model_folder: Path, policy: str, shared: bool
) -> None:
    """Six requests at once over a store with holes: all equal to their cold runs, nothing left."""
    chance = random.Random(f"{policy} {shared}")
    async with batch(model_folder, chance, shared=shared, kept=0.7) as b:
        before = asyncio.all_tasks()
        results = await b.restore(iter([policy] * len(LENGTHS)))
        assert not [r for r in results.values() if isinstance(r, BaseException)]
        for (name, result), cold in zip(results.items(), b.colds, strict=True):
            await b.check_equal(name, cold)
            cells = result.recomputed_cells + sum(result.loaded_cells.values())
            assert cells + result.shared_cells >= result.prefix_tokens * LAYERS
        await b.check_no_leaks(before)


@pytest.mark.parametrize("seed", range(10))
async def test_cancelling_one_and_losing_a_tier_leaves_the_others_equal(
    model_folder: Path, seed: int
) -> None:
    """One is cancelled in the middle, the tier fails for another: all that were not cancelled
    equal their cold runs, whatever policies are mixed, and nothing of any is left."""
    chance = random.Random(seed)
    async with batch(model_folder, chance, shared=seed % 2 == 1, kept=0.85) as b:
        before = asyncio.all_tasks()
        b.cancel_at = 1 + seed // 2
        b.fail_reads_of(b.colds[DEAD].vault.keys[SHARED // CHUNK :])
        results = await b.restore(mixed(chance))
        victim = results.pop(f"r{VICTIM}")
        assert isinstance(victim, asyncio.CancelledError)
        for name, result in results.items():
            assert not isinstance(result, BaseException), (name, result)
            await b.check_equal(name, b.colds[int(name[1:])])
        await b.check_no_leaks(before)


async def test_a_dead_tier_costs_its_request_recompute_only(model_folder: Path) -> None:
    """All chunks are stored and one request's reads fail: the others still load all of theirs."""
    chance = random.Random(3)
    async with batch(model_folder, chance, shared=False, kept=1.0) as b:
        before = asyncio.all_tasks()
        b.fail_reads_of(b.colds[DEAD].vault.keys)
        results = await b.restore(iter(["load"] * len(LENGTHS)))
        for i, cold in enumerate(b.colds):
            await b.check_equal(f"r{i}", cold)
            assert (results[f"r{i}"].failed_loads > 0) == (i == DEAD)
            assert (results[f"r{i}"].recomputed_cells > 0) == (i == DEAD)
        await b.check_no_leaks(before)

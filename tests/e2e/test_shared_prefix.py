"""Sessions on one prefix, on a real model: restored once, the very bits of a cold run for all."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from cacheflow.session import Session

LAYERS, CHUNK, PREFIX = 4, 16, 384
GRID = TileGrid((32, 32, 64), 128)
CHANCE = random.Random(11)
COMMON = [CHANCE.randrange(320) for _ in range(PREFIX)]


def prompt(number: int, length: int = 9) -> list[int]:
    """The common beginning and some tokens of its own."""
    chance = random.Random(number)
    return [*COMMON, *(chance.randrange(320) for _ in range(length))]


class Served:
    """An engine with sessions, a store that has the common beginning, and its cold KV."""

    def __init__(self, engine: Any, flow: CacheFlow, store: MemoryBackend) -> None:
        self.engine = engine
        self.flow = flow
        self.store = store
        self.cold: list[tuple[torch.Tensor, torch.Tensor]] = []

    async def prepare(self) -> None:
        """Compute the beginning cold, keep a copy of its KV, and store it."""
        first = self.flow.session("first")
        await self.generate(first, prompt(0), policy="recompute", save=True)
        self.cold = self.kv(first)
        await first.forget()

    async def generate(
        self,
        session: Session,
        tokens: Sequence[int],
        count: int = 1,
        report: Generation | None = None,
        **options: Any,
    ) -> list[int]:
        options.setdefault("save", False)
        made = session.generate(tokens, max_new_tokens=count, report=report, **options)
        return [token async for token in made]

    def kv(self, session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.engine.kv(session.requests[0], layer, PREFIX) for layer in range(LAYERS)]

    def check_equal(self, session: Session) -> None:
        """The common part of the session's KV has the bits of the cold run."""
        for mine, cold in zip(self.kv(session), self.cold, strict=True):
            assert torch.equal(mine[0], cold[0])
            assert torch.equal(mine[1], cold[1])


@asynccontextmanager
async def served(folder: Path, tmp_path: Path) -> AsyncIterator[Served]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    store = MemoryBackend()
    settings = Settings(cache_dir=tmp_path, keep_costs=False)
    try:
        async with CacheFlow.open(settings, engine=engine, backends={"store": store}) as flow:
            made = Served(engine, flow, store)
            await made.prepare()
            yield made
        assert engine.open_requests == []
        assert engine.kv_used_bytes == 0
    finally:
        await engine.aclose()


async def test_eight_sessions_on_one_prefix_restore_it_once(
    model_folder: Path, tmp_path: Path
) -> None:
    """Eight at once: bytes loaded and tokens computed are those of one restore, every session's KV
    is bit-equal to the cold run's, and the pages are held once."""
    async with served(model_folder, tmp_path) as s:
        sessions = [s.flow.session(f"s{i}") for i in range(8)]
        reports = [Generation() for _ in sessions]
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(
                    s.generate(session, prompt(i), report=report)
                    for i, (session, report) in enumerate(zip(sessions, reports, strict=True))
                )
            )
        for session in sessions:
            s.check_equal(session)
        done = [report.restoration for report in reports if report.restoration is not None]
        loaded = sum(sum(each.loaded_cells.values()) for each in done)
        computed = sum(each.recomputed_cells for each in done)
        shared = sum(each.shared_cells for each in done)
        assert len(done) == 8
        assert loaded + computed == PREFIX * LAYERS
        assert shared == 7 * PREFIX * LAYERS
        assert [report.cached_tokens for report in reports] == [PREFIX] * 8
        layout = s.engine.layout
        last_pages = 8 * GRID.tile(GRID.index_at(PREFIX)).width
        assert s.engine.kv_used_bytes == (PREFIX + last_pages) * layout.token_bytes


async def test_many_at_once_say_what_each_says_alone(model_folder: Path, tmp_path: Path) -> None:
    """32 requests in parallel (four beginnings of different length, some cancelled) generate the
    tokens that each generates alone."""
    async with served(model_folder, tmp_path) as s:
        lengths = (5, 9, 40, 200)
        prompts = [prompt(i, lengths[i % 4])[(i // 8) * 32 :] for i in range(32)]
        alone = []
        for tokens in prompts:
            session = s.flow.session("alone")
            alone.append(await s.generate(session, tokens, 4, policy="recompute"))
            await session.forget()
        sessions = [s.flow.session(f"s{i}") for i in range(32)]
        tasks = [
            asyncio.create_task(s.generate(session, tokens, 4))
            for session, tokens in zip(sessions, prompts, strict=True)
        ]
        await asyncio.sleep(0)
        for i in (0, 9, 18):
            tasks[i].cancel()
        async with asyncio.timeout(60):
            together = await asyncio.gather(*tasks, return_exceptions=True)
        for i, (made, expected) in enumerate(zip(together, alone, strict=True)):
            if i not in (0, 9, 18):
                assert made == expected, i


@pytest.mark.parametrize("reads", [1, 2, 4, 7])
async def test_the_others_are_bit_equal_wherever_the_leader_is_cancelled(
    model_folder: Path, tmp_path: Path, reads: int
) -> None:
    """The first of three goes at the n-th read; the others' KV has the bits of the cold run."""
    async with served(model_folder, tmp_path) as s:
        seen = 0
        sessions = [s.flow.session(f"s{i}") for i in range(3)]
        tasks: list[asyncio.Task[list[int]]] = []

        async def count(read: object) -> None:
            nonlocal seen
            seen += 1
            if seen == reads:
                tasks[0].cancel()

        s.store.before_read = count
        for i, session in enumerate(sessions):
            tasks.append(asyncio.create_task(s.generate(session, prompt(i))))
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        for session, task in zip(sessions[1:], tasks[1:], strict=True):
            assert task.exception() is None
            s.check_equal(session)


async def test_a_resident_prefix_is_shared_and_outlives_its_first_session(
    model_folder: Path, tmp_path: Path
) -> None:
    """The second session reads and computes nothing of what the first has in memory, and goes on
    decoding as before when the first is forgotten."""
    async with served(model_folder, tmp_path) as s:
        first, second = s.flow.session("a"), s.flow.session("b")
        expected = await s.generate(first, prompt(3), 6, policy="recompute")
        await first.forget()
        await s.generate(first, prompt(1), 2)
        reads, report = s.store.reads, Generation()
        tokens = []
        async for token in second.generate(prompt(3), max_new_tokens=6, save=False, report=report):
            tokens.append(token)
            if len(tokens) == 2:
                await first.forget()
        assert s.store.reads == reads
        assert report.restoration is not None
        assert report.restoration.shared_cells == PREFIX * LAYERS
        assert tokens == expected
        s.check_equal(second)

"""Sessions of a real model, used in any order: the tokens of a cold run, and no page is lost."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cacheflow.errors import ClosedError
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.session import Session

GRID = TileGrid((32, 32, 64), 128)
MOST_TOKENS = 400
MOST_SESSIONS = 6
MOST_NEW = 6

lengths = strategies.integers(1, 150)
seeds = strategies.integers(0, 5)
picks = strategies.integers(0, MOST_SESSIONS - 1)
counts = strategies.integers(1, MOST_NEW)
steps = strategies.integers(0, 60)


@dataclass
class World:
    """What all examples share: a loop, an engine, and what it says after a prompt, cold."""

    runner: asyncio.Runner
    engine: Any
    reference: Any
    """Another engine of the same model, for cold runs."""
    said: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    names: count[int] = field(default_factory=count)

    async def cold(self, prompt: list[int], new: int) -> list[int]:
        """Greedy tokens after ``prompt`` from a request that nothing was restored for."""
        made = self.said.get(tuple(prompt), [])
        if len(made) < new:
            engine, name = self.reference, f"cold {next(self.names)}"
            await engine.open(name, prompt)
            await engine.prefill(name)
            made = [await engine.first_token(name)]
            while len(made) < MOST_NEW:
                made += await engine.decode([name], made[-1:])
            await engine.close(name)
            self.said[tuple(prompt)] = made
        return made[:new]


def text_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


class AnyOrder(RuleBasedStateMachine):
    """``world`` is set by the test."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []
        self.store = MemoryBackend()

    @property
    def run(self) -> Any:
        return self.world.runner.run

    @initialize()
    def open(self) -> None:
        chosen = Settings(staging_bytes=1 << 22, keep_costs=False)
        self.opening: AbstractAsyncContextManager[CacheFlow] = CacheFlow.open(
            chosen, engine=self.world.engine, backends={"s": self.store}
        )
        self.flow = self.run(self.opening.__aenter__())
        self.sessions = [self.flow.session("first")]

    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    @rule(tenant=strategies.sampled_from(["", "", "other"]))
    def begin(self, tenant: str) -> None:
        self.sessions.append(self.flow.session(tenant=tenant))

    @rule(pick=picks, length=lengths, seed=seeds, new=counts)
    def goes_on(self, pick: int, length: int, seed: int, new: int) -> None:
        session = self.pick(pick)
        self.run(self.ask(session, [*session.tokens, *text_of(length, seed)], new))

    @rule(pick=picks, at=strategies.floats(0, 1), length=lengths, seed=seeds, new=counts)
    def diverges(self, pick: int, at: float, length: int, seed: int, new: int) -> None:
        session = self.pick(pick)
        kept = session.tokens[: round(at * len(session.tokens))]
        self.run(self.ask(session, [*kept, *text_of(length, seed)], new))

    @rule(pick=picks, new=counts)
    def says_it_again(self, pick: int, new: int) -> None:
        session = self.pick(pick)
        if session.tokens:
            self.run(self.ask(session, list(session.tokens), new))

    @rule(length=lengths, seed=seeds, new=counts, cancelled=strategies.sets(picks), after=steps)
    def all_at_once(
        self, length: int, seed: int, new: int, cancelled: set[int], after: int
    ) -> None:
        async def work() -> None:
            tasks = [
                asyncio.create_task(
                    self.ask(session, [*session.tokens, *text_of(length, seed + i % 2)], new)
                )
                for i, session in enumerate(self.sessions)
            ]
            for _ in range(after):
                await asyncio.sleep(0)
            for i in cancelled:
                if i < len(tasks):
                    tasks[i].cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for i, error in enumerate(ended):
                on_purpose = isinstance(error, asyncio.CancelledError) and i in cancelled
                if isinstance(error, BaseException) and not on_purpose:
                    raise error

        self.run(work())

    @rule(pick=picks, length=lengths, seed=seeds, after=steps, how=strategies.integers(0, 3))
    def is_disturbed(self, pick: int, length: int, seed: int, after: int, how: int) -> None:
        """A turn or prefetch that is cancelled, or whose session is forgotten."""
        session = self.pick(pick)

        async def work() -> None:
            prompt = [*session.tokens, *text_of(length, seed)]
            doing = session.prefetch(prompt[:MOST_TOKENS]) if how % 2 else None
            task = asyncio.ensure_future(doing or self.ask(session, prompt, MOST_NEW))
            for _ in range(after):
                await asyncio.sleep(0)
            if how < 2:
                task.cancel()
            else:
                await session.forget()
            ended = await asyncio.gather(task, return_exceptions=True)
            if isinstance(ended[0], BaseException):
                assert isinstance(ended[0], asyncio.CancelledError | ClosedError), ended[0]

        self.run(work())

    @precondition(lambda self: len(self.sessions) < MOST_SESSIONS)
    @rule(pick=picks)
    def forks(self, pick: int) -> None:
        self.sessions.append(self.run(self.pick(pick).fork()))

    @rule(pick=picks, at=strategies.floats(0, 1))
    def is_cut(self, pick: int, at: float) -> None:
        session = self.pick(pick)
        self.run(session.truncate(round(at * len(session.tokens))))

    @rule(pick=picks)
    def is_forgotten(self, pick: int) -> None:
        self.run(self.pick(pick).forget())

    @rule(pick=picks)
    def is_prefetched(self, pick: int) -> None:
        self.run(self.pick(pick).prefetch())

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(pick=picks)
    def is_closed(self, pick: int) -> None:
        session = self.pick(pick)
        self.sessions.remove(session)
        self.run(session.close())

    @rule(pick=picks, state=strategies.sampled_from(["active", "waiting", "idle", "done"]))
    def is_advised(self, pick: int, state: Any) -> None:
        self.run(self.pick(pick).hint(state, eta=1.0))

    @rule()
    def flush(self) -> None:
        self.run(self.flow.flush())

    def pick(self, number: int) -> Session:
        return self.sessions[number % len(self.sessions)]

    async def ask(self, session: Session, prompt: list[int], new: int) -> None:
        prompt, report = prompt[-MOST_TOKENS:], Generation()
        made = [t async for t in session.generate(prompt, max_new_tokens=new, report=report)]
        assert made == await self.world.cold(prompt, new)
        assert session.tokens == (*prompt, *made)
        assert report.usage.cached_tokens <= len(prompt)

    def teardown(self) -> None:
        if not self.sessions:
            return
        self.run(self.opening.__aexit__(None, None, None))
        pool, engine = self.flow.restorer.pool, self.world.engine
        assert pool.leased_bytes == pool.quarantined_bytes() == 0
        assert engine.open_requests == []
        assert engine.kv_used_bytes == 0
        self.run(nothing_runs())


async def nothing_runs() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


@pytest.fixture(scope="module")
def world(model_folder: Path) -> Iterator[World]:
    """Memory for four full histories: room has to be made, and waited for."""
    with asyncio.Runner() as runner:

        def opened(kv_bytes: int) -> Any:
            work = TransformersEngine.open_model(
                model_folder, dtype="float32", grid=GRID, chunk_tokens=16, kv_bytes=kv_bytes
            )
            return runner.run(work)

        made = World(runner, opened(2 << 20), opened(1 << 28))
        yield made
        runner.run(made.engine.aclose())
        runner.run(made.reference.aclose())


def test_sessions_used_in_any_order(world: World) -> None:
    """Turns, forks, cuts, prefetches, cancellations, many at once: tokens are those of a cold run,
    and in the end no page, task or staging memory is left."""
    AnyOrder.world = world
    quick = not os.environ.get("CACHEFLOW_FULL")
    chosen = settings(
        settings.get_profile("quick"), max_examples=8 if quick else 300, stateful_step_count=20
    )
    run_state_machine_as_test(AnyOrder, settings=chosen)

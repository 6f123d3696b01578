"""Sessions used at random by several tasks at once while whatever they await takes its time.

Every turn's tokens are those of a cold run, every KV byte is checked, and in the end nothing is
left. A fiftieth of the seeds of ``CACHEFLOW_FULL=1``.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.session import CacheFlow, Session, opening
from cacheflow.settings import Settings
from tests.conftest import FULL
from tests.unit.session.adversity import (
    Adversity,
    BurntError,
    Engine,
    LoopClock,
    Store,
    VirtualLoop,
)
from tests.unit.session.conftest import cold

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

SEEDS = range(500 if FULL else 10)
MOST_TOKENS = 400
POLICIES = ["adaptive", "adaptive", "staircase", "two-pointer", "cake", "load", "recompute"]


@dataclass(eq=False)
class Users:
    """Who uses the sessions of a flow."""

    flow: CacheFlow
    events: Adversity
    chance: random.Random
    folder: Path
    sessions: list[Session] = field(default_factory=list)
    gone: dict[str, int] = field(default_factory=dict)
    """How often each session was forgotten or closed, by its id."""
    names: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.stems = [self.text(300) for _ in range(2)]

    def text(self, length: int) -> list[int]:
        return [self.chance.randrange(1000) for _ in range(length)]

    def prompt(self, session: Session) -> list[int]:
        """What goes on from the history, diverges from it, or begins as others do."""
        chance, how, history = self.chance, self.chance.random(), list(session.tokens)
        if history and how < 0.45:
            tokens = [*history, *self.text(chance.choice([1, 5, 17, 40, 100]))]
        elif history and how < 0.6:
            kept = chance.randrange(len(history) + 1)
            tokens = [*history[:kept], *self.text(chance.choice([1, 20, 60]))]
        else:
            kept = chance.choice([20, 64, 100, 128, 200, 256, 290])
            tokens = chance.choice(self.stems)[:kept] + self.text(chance.choice([1, 3, 20, 90]))
        return tokens[:MOST_TOKENS]

    async def told(self, session: Session, work: Callable[[], Awaitable[None]]) -> None:
        """Only who was forgotten meanwhile, or whose engine broke, hears of it."""
        before = self.gone.get(session.id, 0)
        try:
            await work()
        except ClosedError:
            assert self.gone.get(session.id, 0) > before or session not in self.sessions
        except BurntError:
            pass

    async def turn(self, session: Session, prompt: list[int], new: int, **options: Any) -> None:
        made: list[int] = []
        leaves = self.chance.choice([0, 0, 0, self.chance.randrange(1, new + 1)])
        stream = session.generate(prompt, max_new_tokens=new, **options)
        try:
            async for token in stream:
                made.append(token)
                await self.events.wait("consumer")
                if len(made) == leaves:
                    break
        finally:
            await stream.aclose()
            assert made == cold(prompt, new)[: len(made)]
        assert len(made) == (leaves or new)

    async def join(self, session: Session, **options: Any) -> None:
        """A prefetch, and turns or another one that go on from it while it is under way."""
        prompt = self.prompt(session)[: MOST_TOKENS - 120]
        first = self.told(session, partial(session.prefetch, prompt, **options))
        tasks = [asyncio.create_task(first)]
        try:
            for _ in range(self.chance.choice([1, 1, 2])):
                await self.events.wait("joins", self.chance.choice([0, 1, 3, 8]))
                prompt = [*prompt, *self.text(self.chance.choice([1, 10, 40]))]
                turns = self.chance.random() < 0.8
                more: Any = partial(self.turn, new=3) if turns else Session.prefetch
                tasks.append(
                    asyncio.create_task(self.told(session, partial(more, session, prompt)))
                )
                if self.chance.random() < 0.1:
                    self.chance.choice(tasks).cancel()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if error and not isinstance(error, asyncio.CancelledError):
                    raise error

    async def act(self) -> None:
        """Something, with any session."""
        chance = self.chance
        if not self.sessions or (len(self.sessions) < 5 and chance.random() < 0.2):
            tenant = chance.choice(["", "", "", "other"])
            self.sessions.append(self.flow.session(f"s{next(self.names)}", tenant=tenant))
        session, options = chance.choice(self.sessions), dict[str, Any]()
        if chance.random() < 0.5:
            options["policy"] = chance.choice(POLICIES)
        if chance.random() < 0.3:
            options["priority"] = chance.randrange(3)
        what = chance.choices(["turn", "prefetch", "join", "other"], [10, 4, 8, 8])[0]
        if what == "turn":
            save, new = chance.random() < 0.8, chance.choice([1, 3, 20])
            prompt = self.prompt(session)
            await self.told(session, partial(self.turn, session, prompt, new, save=save, **options))
        elif what == "prefetch":
            again = session.tokens and chance.random() < 0.3
            wanted = None if again else self.prompt(session)
            await self.told(session, partial(session.prefetch, wanted, **options))
        elif what == "join":
            await self.join(session, **options)
        else:
            with suppress(CapacityError, ClosedError, ConfigError):  # shorter, or ended, meanwhile
                await self.change(session)

    async def change(self, session: Session) -> None:
        what = self.chance.choice(["fork", "fork", "cut", "cut", "forget", "close", "rest"])
        if what == "fork":
            self.sessions.append(await session.fork(f"s{next(self.names)}"))
        elif what == "cut":
            await session.truncate(self.chance.randrange(len(session.tokens) + 1))
        elif what == "forget":
            self.gone[session.id] = self.gone.get(session.id, 0) + 1
            await session.forget()
        elif what == "close":
            self.sessions.remove(session)
            await session.close()
        else:
            await session.hint("waiting", eta=1.0)
            await session.export(self.folder / f"exported {next(self.names)}")

    async def use(self, times: int) -> None:
        """One user; a quarter of what it begins is cancelled."""
        for _ in range(times):
            task = asyncio.create_task(self.act())
            if self.chance.random() < 0.25:
                await self.events.wait("cancel", self.chance.choice([1, 2, 4, 8]))
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self.events.wait("user")


async def used(loop: VirtualLoop, seed: int, folder: Path) -> None:
    chance, events = random.Random(seed), loop.events
    faults = chance.choice([0.0, 0.0, 0.05])
    engine = Engine(
        loop, chance.choice([0.0, 0.0, 0.005]), kv_tokens=chance.choice([None, 600, 1100, 2000])
    )
    names = ["fast", "slow"][: chance.choice([1, 2])]
    chosen = Settings(
        staging_bytes=chance.choice([1 << 20, 1 << 22]),
        load_deadline=chance.choice([0.05, 30]),
        max_restores=chance.choice([None, None, 1, 2]),
        objective=chance.choice(["tail", "mean", "deadline", "makespan"]),
        cache_dir=folder,
        keep_costs=False,
    )
    stores = {name: Store(name, events, faults) for name in names}
    async with CacheFlow.open(chosen, engine=engine, backends=stores) as flow:
        users = Users(flow, events, random.Random(seed + 1), folder)
        await asyncio.gather(*(users.use(8) for _ in range(chance.choice([2, 3, 5]))))
        assert all(session.is_idle for session in users.sessions)
        assert flow.restorer.active_restores == 0
    assert engine.open_requests == []
    assert engine.paused == []
    pool = flow.restorer.pool
    assert pool.leased_bytes == pool.quarantined_bytes() == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await engine.aclose()


@pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_takes_long(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups, reads, writes, layers, copies and the engine's own answers come in any order."""
    loop, unheard = VirtualLoop(Adversity(seed)), list[Any]()
    monkeypatch.setattr(opening, "SystemClock", lambda: LoopClock(loop))
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    try:
        loop.run_until_complete(used(loop, seed, tmp_path))
    finally:
        loop.close()
    assert not unheard

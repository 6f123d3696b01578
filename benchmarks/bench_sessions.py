"""Sessions at the same time: turns, cancellations, disconnects, forks, pauses, for a while.

Sixty-four sessions of four tenants on a small random model (float32), with KV memory for a part of
them and a tier in memory, over its cap, for the rest. Every token of every turn, also of those that
were cancelled half way, is compared with a cold run of its prompt in an engine of its own, so that
no session can say what another one should. At the end nothing is left: no page, no staging memory,
no task.

    make bench-sessions ARGS="--seconds 600"
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from rigs import fair, load_options, random_prompt, show, start

from cacheflow.errors import CapacityError
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.tiny_model import save_tiny_llama
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    import argparse

    from cacheflow.session import Session

GRID: Final = TileGrid((32, 32, 64), 128)
CHUNK: Final = 16
SESSIONS: Final = 64
TENANTS: Final = ("", "a", "b", "c")
MOST_TOKENS: Final = 700
MOST_NEW: Final = 12
KV_BYTES: Final = 12 << 20
"""Room for some two dozen long histories."""
TIER_BYTES: Final = 64 << 20
"""Fills up within a minute; then chunks are evicted."""
RSS_SLACK: Final = 48 << 20
"""What torch and the allocator may still take in the second half."""


@dataclass(slots=True)
class Said:
    """One turn: what was asked, and what was said until it ended or was ended."""

    prompt: tuple[int, ...]
    tokens: list[int]


@dataclass(slots=True)
class Record:
    """What happened."""

    turns: Counter[str] = field(default_factory=Counter)
    ttft: list[float] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    cached: int = 0
    prompts: int = 0
    rss: list[int] = field(default_factory=list)


class Load:
    """So many workers, each with a session of its own that it now and then forks or replaces."""

    def __init__(self, flow: CacheFlow, seed: int) -> None:
        self.record = Record()
        self._flow = flow
        self._seed = seed
        self._system = [random_prompt(random.Random(n), 96) for n in range(3)]

    async def run(self, seconds: float, sessions: int) -> None:
        """Until the time is over; turns under way end."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(self._work(number, end))
            group.create_task(self._watch(end))

    async def _work(self, number: int, end: float) -> None:
        chance = random.Random(self._seed * 1000 + number)
        session = self._new(number)
        while time.monotonic() < end:
            if len(session.tokens) > MOST_TOKENS - 150 or chance.random() < 0.05:
                await session.close()
                session = self._new(number)
            await self._turn(session, self._prompt(session, chance), chance)
            session = await self._pause(session, chance)
        await session.close()

    def _new(self, number: int) -> Session:
        return self._flow.session(tenant=TENANTS[number % len(TENANTS)])

    def _prompt(self, session: Session, chance: random.Random) -> list[int]:
        history = list(session.tokens)
        if not history:
            history = list(self._system[chance.randrange(3)])
        elif chance.random() < 0.1:  # it goes back and says something else
            history = history[: chance.randrange(1, len(history))]
        return history + random_prompt(chance, chance.randrange(1, 120))

    async def _turn(self, session: Session, prompt: list[int], chance: random.Random) -> None:
        """All of it, or cancelled at some time, or left after some tokens as by a disconnect."""
        said, report = Said(tuple(prompt), []), Generation()
        how = chance.choices(("whole", "cancelled", "left"), (0.7, 0.2, 0.1))[0]
        leave = chance.randrange(1, MOST_NEW) if how == "left" else MOST_NEW

        async def listen() -> None:
            stream = session.generate(prompt, max_new_tokens=MOST_NEW, report=report)
            async with aclosing(stream) as tokens:
                async for token in tokens:
                    said.tokens.append(token)
                    if len(said.tokens) == leave:
                        break

        task = asyncio.create_task(listen())
        if how == "cancelled":
            await asyncio.wait([task], timeout=chance.expovariate(2.0))
            how = "whole" if task.done() else how
            task.cancel()
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if isinstance(error, CapacityError):
            how = "refused"
        elif error is not None:
            raise error
        self._note(how, said, report)

    def _note(self, how: str, said: Said, report: Generation) -> None:
        record = self.record
        record.turns[how] += 1
        record.said.append(said)
        if report.ttft_seconds is not None:
            record.ttft.append(report.ttft_seconds)
            record.cached += report.usage.cached_tokens
            record.prompts += report.usage.prompt_tokens

    async def _pause(self, session: Session, chance: random.Random) -> Session:
        """A tool call: with advice, a prefetch, memory lost, or another branch afterwards."""
        what = chance.random()
        if what < 0.15:
            await session.hint("waiting", eta=0.05)
        elif what < 0.25:
            await session.forget()
            with suppress(CapacityError):
                await session.prefetch()
        elif what < 0.35:
            with suppress(CapacityError):
                branch = await session.fork()
                await session.close()
                session = branch
        elif what < 0.4 and session.tokens:
            with suppress(CapacityError):
                await session.truncate(chance.randrange(1, len(session.tokens) + 1))
        await asyncio.sleep(chance.expovariate(20.0))
        return session

    async def _watch(self, end: float) -> None:
        while time.monotonic() < end:
            self.record.rss.append(_rss())
            await asyncio.sleep(0.5)


def _rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def check(said: list[Said], folder: Path) -> tuple[int, int]:
    """Tokens that were compared with cold runs, and turns that said something else."""
    engine = await open_engine(folder, 1 << 28)
    compared = wrong = 0
    cold: dict[tuple[int, ...], list[int]] = {}
    try:
        for name in count():
            if not said:
                return compared, wrong
            one = said.pop()
            expected = cold.get(one.prompt, [])
            if len(expected) < len(one.tokens):
                await engine.open(f"cold {name}", one.prompt)
                await engine.prefill(f"cold {name}")
                expected = [await engine.first_token(f"cold {name}")]
                while len(expected) < len(one.tokens):
                    expected += await engine.decode([f"cold {name}"], expected[-1:])
                await engine.close(f"cold {name}")
                cold[one.prompt] = expected
            compared += len(one.tokens)
            wrong += one.tokens != expected[: len(one.tokens)]
    finally:
        await engine.aclose()
    return compared, wrong


async def open_engine(folder: Path, kv_bytes: int) -> Any:
    """The small model."""
    return await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=kv_bytes
    )


def make_model(folder: Path) -> Path:
    """Random weights: grouped queries, three layers, 320 tokens of vocabulary."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 1024}
    return save_tiny_llama(folder, 17, **sizes, **heads)


async def load(seconds: float, folder: Path, sessions: int, seed: int) -> dict[str, Any]:
    """Run it; the figures, with what is wrong in ``wrong``."""
    tasks = asyncio.all_tasks()
    engine = await open_engine(folder, KV_BYTES)
    wrong: list[str] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        tier = {"name": "dram", "backend": "dram", "capacity_bytes": TIER_BYTES}
        settings = Settings(tiers=[tier], staging_bytes=1 << 22, keep_costs=False)
        async with CacheFlow.open(settings, engine=engine) as flow:
            work = Load(flow, seed)
            await work.run(seconds, sessions)
            rows = flow.decoding.rows / max(flow.decoding.steps, 1)
            made = flow.room.made
        pool = flow.restorer.pool
        if engine.kv_used_bytes or engine.open_requests:
            wrong.append(f"{engine.kv_used_bytes} bytes of KV left in {engine.open_requests}")
        if pool.leased_bytes or pool.quarantined_bytes():
            wrong.append("staging memory left")
        if left := asyncio.all_tasks() - tasks:
            wrong.append(f"{len(left)} tasks left")
    record = work.record
    grown = record.rss[-1] - record.rss[len(record.rss) // 2]
    if grown > RSS_SLACK:
        wrong.append(f"memory grew by {grown} bytes in the second half")
    compared, mistaken = await check(record.said, folder)
    if mistaken:
        wrong.append(f"{mistaken} turns said what no cold run says")
    return {
        "seconds": seconds,
        "sessions": sessions,
        "turns": dict(record.turns),
        "tokens_compared": compared,
        "ttft_median": median(record.ttft),
        "ttft_p99": sorted(record.ttft)[int(0.99 * len(record.ttft))],
        "ttft_max": max(record.ttft),
        "max_over_median": max(record.ttft) / median(record.ttft),
        "cached_share": record.cached / record.prompts,
        "rows_a_step": rows,
        "made_room": made,
        "grown_bytes": grown,
        "wrong": wrong,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """With a model of its own."""
    with TemporaryDirectory() as scratch:
        folder = await asyncio.to_thread(make_model, Path(scratch))
        return await load(options.seconds, folder, options.sessions, options.seed)


def tell(found: dict[str, Any]) -> None:
    """What was done, and whether it held."""
    rows = [
        ("turns", ", ".join(f"{n:,} {how}" for how, n in sorted(found["turns"].items()))),
        ("tokens compared with cold runs", f"{found['tokens_compared']:,}"),
        (
            "seconds to the first token",
            "{ttft_median:.3f} median, {ttft_p99:.3f} p99, {ttft_max:.3f} max".format(**found),
        ),
        ("max / median", fair(found["max_over_median"])),
        ("cached prompt tokens", f"{found['cached_share']:.0%}"),
        ("rows a decode step", f"{found['rows_a_step']:.1f}"),
        ("idle sessions that made room", f"{found['made_room']:,}"),
        ("memory grown in the second half", f"{found['grown_bytes'] >> 20} MiB"),
        ("wrong", "; ".join(found["wrong"]) or "nothing"),
    ]
    title = f"{found['sessions']} sessions, {found['seconds']:.0f} s"
    show("sessions", ("what", "figure"), rows, title)


if __name__ == "__main__":
    sys.exit(start(load_options(__doc__, SESSIONS), measure, tell))

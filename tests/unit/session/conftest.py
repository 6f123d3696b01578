"""A flow over an engine without a model and a store in memory, closed with nothing left."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.serving import ServingEngine, next_token
from cacheflow.testing.storage import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.session import Session

    Opened = Callable[..., AbstractAsyncContextManager["Play"]]


class Held:
    """What waits here, once for each call, until it is let go."""

    def __init__(self) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def wait(self, _: object = None) -> None:
        self.began.set()
        await self.go.wait()


class Play:
    """A flow, its engine and its store."""

    def __init__(self, flow: CacheFlow, engine: ServingEngine, store: MemoryBackend) -> None:
        self.flow = flow
        self.engine = engine
        self.store = store

    async def ask(
        self, session: Session, prompt: Sequence[int], new: int = 3, **options: Any
    ) -> Generation:
        """One turn; its tokens are those of a cold run."""
        report: Generation = options.setdefault("report", Generation())
        made = [t async for t in session.generate(prompt, max_new_tokens=new, **options)]
        assert made == cold(prompt, new)
        assert report.finish_reason == "length"
        return report


def cold(prompt: Sequence[int], new: int) -> list[int]:
    """What the engine says after ``prompt``, whatever is cached."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(length)]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """``opened(kv_tokens=..., settings...)``: a :class:`Play`."""

    @asynccontextmanager
    async def open_it(
        *,
        kv_tokens: int | None = None,
        backends: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Play]:
        engine, store = ServingEngine(kv_tokens=kv_tokens), MemoryBackend()
        chosen = Settings(
            cache_dir=tmp_path, keep_costs=False, **{"staging_bytes": 1 << 20, **settings}
        )
        stores = {"store": store} if backends is None else backends
        if chosen.tiers:
            stores = None  # type: ignore[assignment]
        async with CacheFlow.open(chosen, engine=engine, backends=stores) as flow:
            yield Play(flow, engine, store)
        assert engine.open_requests == []
        assert engine.paused == []
        await engine.aclose()

    return open_it

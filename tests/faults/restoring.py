"""A restorer over an engine that checks every byte and a store that can misbehave."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import chunk_keys, key_root, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import ObjectKey, Span, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.restore import Restoration
    from cacheflow.types import Event


__all__ = ["ROOT", "TOKENS", "Rig", "fill", "rig"]

TOKENS = [(5 * i) % 97 for i in range(500)]

ROOT = key_root({"model": "fake"})


async def fill(
    store: MemoryBackend, engine: FakeEngine, tokens: list[int], every: int = 1, first: int = 0
) -> None:
    """Store every ``every``-th chunk, from number ``first`` on."""
    layout = engine.layout
    keys = list(enumerate(chunk_keys(ROOT, tokens, layout.chunk_tokens)))
    for chunk, key in keys[first::every]:
        parts = (engine.expected(tokens, chunk, layer) for layer in range(layout.num_layers))
        payload = bytearray(b"".join(parts))
        name = ObjectKey(key, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
        info, header = seal(
            name, layout, memoryview(payload), grid_id="", segments=(), canonical=False
        )
        await store.store([Write(info, (buffer_from(header), buffer_from(payload)))])


class Rig:
    """The restorer, its engine and store, and what it told."""

    def __init__(self, store: MemoryBackend, deadline: float) -> None:
        self.engine = FakeEngine()
        self.store = store
        self.pool = StagingPool(1 << 20)
        self.events: list[Event] = []
        self.restorer = Restorer(
            self.engine,
            BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock()),
            {"store": store},
            self.pool,
            load_deadline=deadline,
            observer=self.events.append,
        )

    async def run(self, name: str = "r", policy: str = "load") -> Restoration:
        """Restore without opening or closing the engine's request."""
        keys = chunk_keys(ROOT, TOKENS, self.engine.layout.chunk_tokens)
        request = RestoreRequest(name, TOKENS, keys, self.restorer.clock.now())
        return await self.restorer.run(request, load_policy(policy))

    async def restore(self, name: str = "r", policy: str = "load") -> Restoration:
        """Restore and check every byte."""
        await self.engine.open(name, TOKENS)
        try:
            async with asyncio.timeout(20):
                result = await self.run(name, policy)
            assert self.engine.wrong_cells(name, len(TOKENS)) == []
            return result
        finally:
            await self.engine.close(name)


@asynccontextmanager
async def rig(store: MemoryBackend | None = None, deadline: float = 5.0) -> AsyncIterator[Rig]:
    """A filled store behind a running restorer; nothing may be left at the end."""
    made = Rig(store or MemoryBackend(), deadline)
    await fill(made.store, made.engine, TOKENS)
    async with made.restorer:
        yield made
        assert made.pool.leased_bytes == made.pool.quarantined_bytes() == 0
        assert made.restorer._jobs == {}
        assert made.restorer.scheduler._requests == {}
    await made.pool.aclose()
    made.engine.shutdown()

"""A saver over tiers whose stores can be held up, and an engine that counts what is copied out."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cacheflow.clock import SystemClock
from cacheflow.errors import ClosedError
from cacheflow.kv import chunk_keys, key_root
from cacheflow.memory import StagingPool
from cacheflow.restore.saver import Saver
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.staged import StagedCopies
from cacheflow.types import Segment, StoreEnded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from cacheflow.types import Event, StagedPart, TransferResult, Write

__all__ = [
    "CHUNKS",
    "PAYLOAD",
    "Engine",
    "Gated",
    "Rig",
    "Skip",
    "rig",
    "turns_of_the_loop",
    "until",
]

CHUNKS = 8
PAYLOAD = 16384
"""Bytes of one chunk's KV."""


class Engine(FakeEngine):
    """Requests that are computed as soon as they are open; captures are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: list[tuple[str, int]] = []

    async def computed(self, name: str, tokens: list[int]) -> None:
        await self.open(name, tokens)
        await self.prefill(name)

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        if request_id not in self._tokens:
            raise ClosedError(f"{request_id} is not open")
        return (Segment(0, 32, 32), Segment(32, 64, 32), Segment(64, 128, 64))

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        if request_id not in self._tokens:
            raise ClosedError(f"{request_id} is not open")
        self.captures += [(request_id, part.chunk) for part in parts]
        await asyncio.sleep(0)
        await super().capture(request_id, parts)


class Gated(MemoryBackend):
    """Stores wait for :attr:`gate`, one permit each, while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: asyncio.Semaphore | None = None
        self.begun = 0

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self.begun += 1
        if self.gate is not None:
            await self.gate.acquire()
        return await super().store(writes)


class Skip:
    """A write policy that leaves out a fixed number of chunks."""

    name = "skip"

    def __init__(self, count: int) -> None:
        self.count = count

    def skipped(self, chunks: int) -> int:
        return self.count


class Rig:
    def __init__(self, tiers: Mapping[str, MemoryBackend], room: int, **options: Any) -> None:
        self.engine = Engine()
        self.pool = StagingPool(64 * PAYLOAD)
        self.staged = StagedCopies(tiers)
        self.events: list[Event] = []
        engine: Any = self.engine
        self.saver = Saver(
            engine,
            tiers,
            self.pool,
            SystemClock(),
            self.events.append,
            self.staged,
            max_bytes=len(tiers) * room * PAYLOAD,
            **options,
        )

    async def open(self, name: str, chunks: int = CHUNKS) -> Sequence[Any]:
        tokens = list(range(chunks * 16))
        await self.engine.computed(name, tokens)
        return chunk_keys(key_root({"model": "fake"}), tokens, 16)

    @property
    def staged_chunks(self) -> int:
        return self.pool.leased_bytes // PAYLOAD

    def dropped(self) -> dict[tuple[str, str], int]:
        """Chunks that events say were dropped, by tier and reason."""
        counts: dict[tuple[str, str], int] = {}
        for event in self.events:
            if isinstance(event, StoreEnded) and event.outcome != "ok":
                what = event.channel, event.outcome
                counts[what] = counts.get(what, 0) + event.chunks
        return counts


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def turns_of_the_loop(count: int = 50) -> None:
    """Whatever can go on does."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def rig(
    tiers: Mapping[str, MemoryBackend], room: int = 16, **options: Any
) -> AsyncIterator[Rig]:
    """``room``: chunks that may be staged for each tier. Afterwards nothing is left."""
    it = Rig(tiers, room, **options)
    async with it.saver:
        yield it
    await turns_of_the_loop()
    assert len(it.saver._turns) == 0
    assert it.pool.leased_bytes == it.pool.quarantined_bytes() == 0
    assert await it.staged.used_bytes() == 0
    assert all(writer.queue.held_bytes == 0 for writer in it.saver._writers.values())
    await it.staged.aclose()
    it.engine.shutdown()
    await it.pool.aclose()

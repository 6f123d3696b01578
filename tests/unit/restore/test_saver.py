"""Saves that meet at one key: the canonical copy wins, however they interleave."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheflow.clock import SystemClock
from cacheflow.kv import chunk_keys, decode_header, key_root
from cacheflow.memory import StagingPool
from cacheflow.restore.saver import Saved, Saver
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.staged import StagedCopies
from cacheflow.types import Segment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cacheflow.types import ChunkKey, StagedPart, TransferResult, Write

TOKENS = list(range(32))
CANONICAL = (Segment(0, 32, 32),)
DECODED = (Segment(0, 16, 16), Segment(16, 32, 1))


class Engine(FakeEngine):
    """Requests whose history says how they were computed; capturing some of them waits."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[str, tuple[Segment, ...]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.captures: list[str] = []

    async def computed(self, name: str, history: tuple[Segment, ...]) -> None:
        await self.open(name, TOKENS)
        self.histories[name] = history
        await self.prefill(name)

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        return self.histories[request_id]

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        self.captures.append(request_id)
        if gate := self.gates.get(request_id):
            await gate.wait()
        await super().capture(request_id, parts)


class LateStore(MemoryBackend):
    """A store that, told to, goes on after its caller has given up: it lands when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.hang = False
        self.landing: list[Write] = []

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        if not self.hang:
            return await super().store(writes)
        for write in writes:
            for part in write.parts:
                part.hold.acquire()
            self.landing.append(write)
        await asyncio.Event().wait()
        raise AssertionError

    async def land(self) -> None:
        for write in self.landing:
            await super().store([write])
            for part in write.parts:
                part.hold.release()


class Rig:
    def __init__(self, pool: StagingPool, store: MemoryBackend, deadline: float) -> None:
        self.engine = Engine()
        self.store = store
        root = key_root({"model": "fake"})
        self.keys = chunk_keys(root, TOKENS, self.engine.layout.chunk_tokens)
        engine: Any = self.engine
        channels = {"s": store}
        self.lookups = 0
        store.before_lookup = self._looked_up
        self.staged = StagedCopies(channels)
        self.saver = Saver(
            engine,
            channels,
            pool,
            SystemClock(),
            lambda event: None,
            self.staged,
            deadline=deadline,
        )

    def begin(self, name: str) -> Saved:
        return self.saver.save(name, self.keys)["s"]

    async def save(self, name: str) -> Saved:
        return await ended(self.begin(name))

    def set_deadline(self, seconds: float) -> None:
        writer = self.saver._writers["s"]
        writer._shared = replace(writer._shared, deadline=seconds)

    def is_canonical(self) -> dict[ChunkKey, bool]:
        infos = [decode_header(memoryview(data)) for data in self.store.objects.values()]
        return {info.key.chunk: info.canonical for info in infos}

    async def _looked_up(self) -> None:
        self.lookups += 1

    async def until_captured(self, *names: str) -> None:
        await until(lambda: self.engine.captures == list(names))

    async def until_looked_up(self, times: int) -> None:
        await until(lambda: self.lookups >= times)
        for _ in range(10):  # whatever can go on without the gate does
            await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def ended(saved: Saved) -> Saved:
    await until(lambda: not saved.pending)
    return saved


@asynccontextmanager
async def rig(store: MemoryBackend | None = None, deadline: float = 30.0) -> AsyncIterator[Rig]:
    pool = StagingPool(1 << 20)
    it = Rig(pool, store or MemoryBackend(), deadline)
    async with it.saver:
        yield it
        assert await it.saver.flush(20)
        assert len(it.saver._turns) == 0
        assert pool.leased_bytes == pool.quarantined_bytes() == 0
        assert await it.staged.used_bytes() == 0
    await it.staged.aclose()
    it.engine.shutdown()
    await pool.aclose()


async def test_a_slow_save_does_not_replace_a_canonical_copy() -> None:
    """A save from another history has looked, found nothing and is on its way when the canonical
    save of the same keys comes: in the end the canonical copies are there."""
    async with rig() as r:
        await r.engine.computed("decoded", DECODED)
        await r.engine.computed("canonical", CANONICAL)
        gate = r.engine.gates["decoded"] = asyncio.Event()
        first = r.begin("decoded")
        await r.until_captured("decoded")
        second = r.begin("canonical")
        await r.until_looked_up(2)
        gate.set()
        assert await ended(second) == Saved(stored=2)
        assert r.is_canonical() == dict.fromkeys(r.keys, True)
        # The canonical copy of a key was there before the other one's turn, or after it.
        await ended(first)
        assert (first.stored + first.kept, first.dropped) == (2, 0)


async def test_a_save_keeps_what_was_stored_while_it_waited() -> None:
    """The other way round: it waits behind the canonical save, and then stores nothing, nor does
    an equal one; both use the copies that are there instead of making their own."""
    async with rig() as r:
        await r.engine.computed("canonical", CANONICAL)
        await r.engine.computed("decoded", DECODED)
        await r.engine.computed("twin", CANONICAL)
        gate = r.engine.gates["canonical"] = asyncio.Event()
        first = r.begin("canonical")
        await r.until_captured("canonical")
        others = [r.begin(name) for name in ("decoded", "twin")]
        await r.until_looked_up(3)
        gate.set()
        assert await ended(first) == Saved(stored=2)
        assert [await ended(other) for other in others] == [Saved(kept=2), Saved(kept=2)]
        assert r.is_canonical() == dict.fromkeys(r.keys, True)
        assert r.engine.captures == ["canonical", "canonical"]


async def test_a_store_that_was_given_up_does_not_replace_a_canonical_copy() -> None:
    """A store goes on in its tier after its save ran out of time: the canonical save of that key
    waits until it has ended."""
    store = LateStore()
    async with rig(store, deadline=0.05) as r:
        await r.engine.computed("decoded", DECODED)
        await r.engine.computed("canonical", CANONICAL)
        store.hang = True
        assert await r.save("decoded") == Saved(dropped=2)
        store.hang = False
        r.set_deadline(30.0)
        second = r.begin("canonical")
        await r.until_looked_up(2)  # ... and goes on as far as it gets
        assert second.stored == 0
        await store.land()
        assert await ended(second) == Saved(stored=2)
        assert r.is_canonical() == dict.fromkeys(r.keys, True)


async def test_waiting_for_a_hung_store_of_the_same_key_ends_with_the_deadline() -> None:
    """A save behind a store that never ends gives its chunks up; nothing is left once it ends."""
    store = LateStore()
    async with rig(store, deadline=0.05) as r:
        await r.engine.computed("decoded", DECODED)
        await r.engine.computed("canonical", CANONICAL)
        store.hang = True
        assert await r.save("decoded") == Saved(dropped=2)
        assert await r.save("canonical") == Saved(dropped=2)
        landing = [write.info.key for write in store.landing]
        assert landing
        assert len(landing) == len(set(landing))
        await store.land()
        await until(lambda: len(r.saver._turns) == 0)

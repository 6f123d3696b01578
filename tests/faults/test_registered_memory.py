"""Memory that backends register: they all hear of it, and in time of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheflow.kv import Stamp
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings, TierSettings
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from cacheflow.testing.faults import FaultyBackend
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Encoded, Guarded, Tier
from cacheflow.types import Codec, Read, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cacheflow.types import Buffer


class Registrar(MemoryBackend):
    """Notes what is registered, and whether the buffers of reads lie in it."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Buffer] = []
        self.where: list[bool] = []
        self.before_read = self._note

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        self.registered.append(memory)
        return lambda: self.registered.remove(memory)

    async def _note(self, read: Read) -> None:
        [memory] = self.registered
        first, size = read.buffer.address, read.buffer.nbytes
        self.where.append(
            memory.address <= first and first + size <= memory.address + memory.nbytes
        )


async def test_it_passes_every_decorator() -> None:
    """What is registered with the outermost reaches the backend, and so does the end of it."""
    inner, memory = Registrar(), buffer_from(bytearray(4096))
    settings = TierSettings(name="t", backend="memory")
    throttled = ThrottledBackend(FaultyBackend(inner, []), Link(1e9, 0.0))
    tier = Encoded(await Tier.over(Guarded(throttled, "t"), settings), Codec.ZSTD, Stamp())
    end = tier.register_memory(memory)
    assert inner.registered == [memory]
    end()
    assert inner.registered == []
    await tier.aclose()


async def test_a_session_registers_its_staging_memory(model_folder: Path) -> None:
    """All loads of a session land in memory that is registered, until just before it is freed."""
    grid, store = TileGrid((32, 32, 64), 128), Registrar()
    engine: Any = await TransformersEngine.open_model(
        model_folder, dtype="float32", grid=grid, chunk_tokens=16, kv_bytes=1 << 28
    )
    settings = Settings(staging_bytes=1 << 22, policy="load")
    prompt = [(7 * i) % 311 for i in range(200)]
    async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:
        for _ in range(2):
            async for _token in flow.session("a").generate(prompt, max_new_tokens=1):
                pass
            await flow.flush(10)
            await flow.session("a").forget()
        pool = flow.restorer.pool
        assert store.registered == [pool.arena]
        assert store.where
        assert all(store.where)
    assert store.registered == []
    await engine.aclose()


async def test_the_arena_is_all_of_the_pool() -> None:
    """Every lease lies in the arena, whose own hold nobody has."""
    pool = StagingPool(1 << 20, pin=False)
    with await pool.lease(5000) as lease:
        arena = pool.arena
        assert arena.address <= lease.buffer.address
        assert (
            lease.buffer.address + 5000 <= arena.address + arena.nbytes == pool.address + (1 << 20)
        )
        assert arena.hold.in_flight == 0
    del arena
    await pool.aclose()

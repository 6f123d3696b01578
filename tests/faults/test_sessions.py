"""Sessions of a real engine, cancelled, closed, crowded, over hung stores: nothing is left."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import CacheFlowError, CapacityError, ClosedError, ConfigError
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.restore.saver import STAGING_OWNER
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.staged import STAGED_CHANNEL
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cacheflow.types import Read

CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


@asynccontextmanager
async def engine_of(folder: Path) -> AsyncIterator[Any]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    try:
        yield engine
    finally:
        await engine.aclose()


async def ask(flow: CacheFlow, name: str, prompt: list[int], **options: Any) -> list[int]:
    return [token async for token in flow.session(name).generate(prompt, **options)]


def assert_nothing_is_left(flow: CacheFlow, engine: Any) -> None:
    pool = flow.restorer.pool
    assert pool.leased_bytes == pool.quarantined_bytes() == 0
    assert flow.restorer._jobs == {}
    assert flow.restorer.scheduler._requests == {}
    assert engine.kv_used_bytes == 0
    assert engine.open_requests == []


@pytest.mark.parametrize("policy", ["adaptive", "load"])
async def test_cancelled_anywhere_a_generation_leaves_nothing(
    model_folder: Path, policy: str
) -> None:
    """Cancelled after any number of loop steps, once or twice, from the lookup through the decoding
    to the save, and forgotten: no lease, task, page or request is left, and the next turn is right.
    """
    prompt = prompt_of(300)
    async with engine_of(model_folder) as engine:
        store = MemoryBackend()
        settings = Settings(staging_bytes=1 << 22)
        async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:
            expected = await ask(flow, "cold", prompt[:200], max_new_tokens=4, policy="recompute")
            await flow.forget()
            tasks = asyncio.all_tasks()
            ended, steps, chance = 0, 0, random.Random(2)
            while ended < 3:
                work = ask(flow, "s", prompt, max_new_tokens=3, policy=policy)
                task = asyncio.create_task(work)
                for _ in range(steps):
                    await asyncio.sleep(0)
                ended += task.done()
                for _ in range(chance.randrange(1, 4)):
                    task.cancel()
                    await asyncio.sleep(0)
                await asyncio.wait([task])
                await flow.forget()
                await flow.flush()
                await settled(engine)
                assert_nothing_is_left(flow, engine)
                assert asyncio.all_tasks() == tasks
                steps += 1 + steps // 20
            got = await ask(flow, "s", prompt[:200], max_new_tokens=4, policy=policy)
            assert got == expected


async def settled(engine: Any) -> None:
    """Until what a cancelled caller left on the lanes has ended."""
    for _ in range(5000):
        if engine.kv_used_bytes == 0:
            return
        await asyncio.sleep(0.001)


class HungStore(MemoryBackend):
    """Takes what is to be stored and, while :attr:`hang` is set, never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = 0
        self.hang = True
        self.hanging = asyncio.Event()

    async def store(self, writes: Any) -> Any:
        self.stores += 1
        if self.hang:
            self.hanging.set()
            await asyncio.Event().wait()
        return await super().store(writes)


async def test_a_hung_store_ends_with_its_deadline(model_folder: Path) -> None:
    """A tier that never answers a store is given up after one deadline, not one a chunk, and holds
    up neither the turn nor the other tier, which gets everything."""
    hung, good = HungStore(), MemoryBackend()
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22, load_deadline=0.1)
        backends = {"hung": hung, "good": good}
        async with CacheFlow.open(settings, engine=engine, backends=backends) as flow:
            report = Generation()
            async with asyncio.timeout(20):
                await ask(flow, "a", prompt_of(200), max_new_tokens=2, report=report)
                await flow.flush()
            assert report.saved is not None
            assert report.saved["hung"].dropped == 12
            assert report.saved["good"].stored == 12
            assert hung.stores <= hung.capabilities.suggested_depth
            await flow.forget()
            assert_nothing_is_left(flow, engine)


async def test_a_lookup_that_hangs_before_a_save_ends_with_its_deadline(model_folder: Path) -> None:
    """The same for the lookup that comes before storing."""
    store = MemoryBackend()
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22, load_deadline=0.1)
        async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:

            async def hang() -> None:
                await asyncio.Event().wait()

            store.before_lookup = hang
            report = Generation()
            async with asyncio.timeout(20):
                await ask(flow, "a", prompt_of(200), max_new_tokens=2, report=report)
                await flow.flush()
            assert report.saved is not None
            assert report.saved["s"].dropped == 12


@pytest.mark.parametrize("error", [ValueError("bug"), OSError(28, "full"), TimeoutError()])
async def test_a_store_that_raises_anything_costs_its_chunks(
    model_folder: Path, error: Exception
) -> None:
    """A turn ends well whatever a tier raises when its chunks are to be stored."""

    class Broken(MemoryBackend):
        async def store(self, writes: Any) -> Any:
            raise error

    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22)
        async with CacheFlow.open(settings, engine=engine, backends={"s": Broken()}) as flow:
            report = Generation()
            await ask(flow, "a", prompt_of(100), max_new_tokens=2, report=report)
            await flow.flush()
            assert report.saved is not None
            assert report.saved["s"].dropped == 6


@pytest.mark.parametrize("where", ["restore", "decode", "save"])
async def test_closing_during_a_generation_ends_it(model_folder: Path, where: str) -> None:
    """Leaving CacheFlow while a session restores or decodes: the generation ends with a
    ClosedError, and whoever closes is not cancelled. While something is being stored by a hung
    tier: closing is bounded, and what is not stored is dropped and counted."""
    store = HungStore()
    store.hang = where == "save"
    report = Generation()
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22, flush_seconds=0.1)
        async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:
            store.hang = False
            await ask(flow, "first", prompt_of(200), max_new_tokens=1)
            await flow.flush()
            await flow.forget()
            store.hang = where == "save"
            reached = asyncio.Event()

            async def hang(read: Read) -> None:
                reached.set()
                await asyncio.Event().wait()

            store.before_read = hang if where == "restore" else None

            async def work() -> list[int]:
                tokens = []
                stream = flow.session("s").generate(
                    prompt_of(300),
                    max_new_tokens=3 if where == "save" else 500,
                    policy="load",
                    report=report,
                )
                async for token in stream:
                    tokens.append(token)
                    if where == "decode" and len(tokens) == 5:
                        reached.set()
                return tokens

            task = asyncio.create_task(work())
            await (store.hanging if where == "save" else reached).wait()
        if where == "save":
            assert len(await task) == 3
            assert report.saved is not None
            assert report.saved["s"].dropped == 6
            assert report.saved["s"].pending == 0
        else:
            with pytest.raises(ClosedError):
                await task
        assert_nothing_is_left(flow, engine)


async def test_closing_while_a_store_answers_its_cancellation_with_an_error(
    model_folder: Path,
) -> None:
    """Whatever a third party's tier does when it is cancelled, closing ends."""

    class Stubborn(MemoryBackend):
        storing = asyncio.Event()

        async def store(self, writes: Any) -> Any:
            self.storing.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("bug") from None

    store = Stubborn()
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22, flush_seconds=0)
        async with asyncio.timeout(20):
            async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:
                report = Generation()
                await ask(flow, "a", prompt_of(100), max_new_tokens=2, report=report)
                await store.storing.wait()
        assert report.saved is not None
        assert report.saved["s"].dropped == 6
        assert_nothing_is_left(flow, engine)


async def test_sixty_four_sessions_over_one_small_pool(model_folder: Path) -> None:
    """64 at once over staging memory for a few loads: no deadlock, everyone the same tokens."""
    prompt = prompt_of(300)
    store = MemoryBackend()
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 20)
        async with CacheFlow.open(settings, engine=engine, backends={"s": store}) as flow:
            expected = await ask(flow, "cold", prompt, max_new_tokens=2, policy="recompute")
            await flow.forget()
            async with asyncio.timeout(60):
                results = await asyncio.gather(
                    *(
                        ask(flow, f"s{i}", [*prompt, i], max_new_tokens=1, policy=policy)
                        for i, policy in zip(range(64), ["load", "adaptive"] * 32, strict=True)
                    )
                )
                again = await ask(flow, "again", prompt, max_new_tokens=2, policy="load")
            assert len(results) == 64
            assert again == expected
            await flow.forget()
            assert_nothing_is_left(flow, engine)


async def test_staging_too_small_for_a_chunk_is_refused(model_folder: Path) -> None:
    """Said before anything is computed, with the number that would do."""
    async with engine_of(model_folder) as engine:
        engine.layout = engine.layout.__class__(40, 8, 128, "float32", 256)
        engine.grid = TileGrid((), 2048)
        with pytest.raises(ConfigError, match=r"staging_bytes.*give at least 251658240"):
            async with CacheFlow.open(
                Settings(staging_bytes=1 << 20), engine=engine, backends={"s": MemoryBackend()}
            ):
                pass


async def test_staging_memory_is_shared_out(model_folder: Path) -> None:
    """Each tier has its share of the staging memory, and so has what is being stored, to be stored
    and to be read again: nobody can take everything."""
    async with engine_of(model_folder) as engine:
        settings, backends = Settings(staging_bytes=4 << 20), {"a": HungStore(), "b": HungStore()}
        async with CacheFlow.open(settings, engine=engine, backends=dict(backends)) as flow:
            pool, share = flow.restorer.pool, 1 << 20
            owners = ("a", "b", STAGED_CHANNEL, STAGING_OWNER)
            for owner in owners:
                with pytest.raises(CapacityError):
                    pool.try_lease(share + 1, owner)
            leases = [pool.try_lease(share, owner) for owner in owners]
            assert all(leases)
            for lease in leases:
                assert lease is not None
                lease.release()


async def test_a_session_forgotten_by_another_task_fails_cleanly(model_folder: Path) -> None:
    """Forgetting a session amid its generation ends that with one of our errors; it works again."""
    async with engine_of(model_folder) as engine:
        settings = Settings(staging_bytes=1 << 22)
        backends = {"s": MemoryBackend()}
        async with CacheFlow.open(settings, engine=engine, backends=backends) as flow:
            for steps in range(0, 200, 7):
                task = asyncio.create_task(ask(flow, "s", prompt_of(200), max_new_tokens=3))
                for _ in range(steps):
                    await asyncio.sleep(0)
                await flow.session("s").forget()
                with suppress(CacheFlowError):
                    await task
                await flow.forget()
                assert_nothing_is_left(flow, engine)


SCRIPT = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from pathlib import Path
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.staged import STAGED_CHANNEL
from cacheflow.types import TileGrid

async def main():
    engine = await TransformersEngine.open_model(
        Path(sys.argv[1]), dtype="float32", grid=TileGrid((32, 32, 64), 128), chunk_tokens=16,
        kv_bytes=1 << 28)
    store = MemoryBackend()
    async with CacheFlow.open(Settings(staging_bytes=1 << 22), engine=engine,
                              backends={"s": store}) as flow:
        session = flow.session("s")
        prompt = list(range(300))
        [t async for t in session.generate(prompt, max_new_tokens=1)]
        await session.forget()
        async def hang(read):
            print("restoring", flush=True)
            await asyncio.Event().wait()
        store.before_read = hang
        try:
            [t async for t in session.generate(prompt, max_new_tokens=1, policy="load")]
        finally:
            pool = flow.restorer.pool
            print("left", pool.leased_bytes, engine.kv_used_bytes, flow.restorer._jobs, flush=True)
    await engine.aclose()

import uvloop
uvloop.run(main()) if sys.argv[2] == "uvloop" else asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_ctrl_c_during_a_restore(model_folder: Path, loop: str) -> None:
    """SIGINT while loads are in flight: everything is given back and the process ends at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model_folder), loop],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "restoring\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert "left 0 0 {}" in out
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "never retrieved" not in err

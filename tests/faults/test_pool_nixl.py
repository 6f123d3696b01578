"""The pool over NIXL when its store hangs, dies and comes back; loads land in registered memory."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import pytest

from cacheflow.errors import BackendError
from cacheflow.memory import InFlight, StagingPool, buffer_from
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.storage_backends.nixl import agent
from cacheflow.storage_backends.nixl.agent import UcxAgent, why_missing
from cacheflow.storage_backends.nixl.memory import OurMemory
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import idle, load_all, store_all
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import Buffer, MemoryKind, Read, TileGrid, TransferStatus
from tests.faults.test_pool_stores import fill, on_disk, opened, started, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cacheflow.storage_backends.pool import PoolBackend

if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)

OBJECTS: Final = [make_object(number) for number in range(24)]


class StagedLoad:
    """Somebody who reads all objects over and over, into leases of a registered pool."""

    def __init__(self, backend: PoolBackend) -> None:
        self.pool = StagingPool(4 << 20, pin=False)
        self.longest = 0.0
        self.statuses: set[TransferStatus] = set()
        self._backend = backend
        self._release = backend.register_memory(self.pool.arena)

    async def round(self) -> set[TransferStatus]:
        """One read of each object: its bytes, or a miss, and soon."""
        start = time.monotonic()
        leases = [await self.pool.lease(len(each.data)) for each in OBJECTS]
        whole = [
            Read(each.key, 0, lease.buffer) for each, lease in zip(OBJECTS, leases, strict=True)
        ]
        try:
            with suppress(BackendError):  # of a lookup when no store is up
                await self._backend.lookup([each.key.chunk for each in OBJECTS])
            results = await load_all(self._backend, whole)
        finally:
            self.longest = max(self.longest, time.monotonic() - start)
            contents = [bytes(lease.view) for lease in leases]
            for lease in leases:
                lease.release()
        expected = {id(read): each.data for read, each in zip(whole, OBJECTS, strict=True)}
        found = {id(read): data for read, data in zip(whole, contents, strict=True)}
        assert len(results) == len(OBJECTS)
        for result in results:
            if result.status is TransferStatus.OK:
                assert found[id(result.request)] == expected[id(result.request)]
        return {result.status for result in results}

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self.statuses |= await self.round()
            await asyncio.sleep(0.005)

    async def all_there(self) -> bool:
        return await self.round() == {TransferStatus.OK}

    async def none_there(self) -> bool:
        return TransferStatus.OK not in await self.round()

    async def nothing_held(self) -> bool:
        return self.pool.leased_bytes == self.pool.quarantined_bytes() == 0

    async def aclose(self) -> None:
        self._release()
        await self.pool.aclose()


@pytest.mark.parametrize("transports", ["tcp", "all"])
async def test_a_store_that_hangs_dies_and_comes_back(
    transports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, SIGCONT, kill -9 and a new start under load: every read ends soon, right or as a
    miss; all memory comes back; the client that was there all the time goes on each time."""
    monkeypatch.setenv("UCX_TLS", transports)
    options = {"arena": "2MiB", "spill": tmp_path / "spill", "transports": '["nixl"]'}
    store = StoreProcess(tmp_path / "log", **options)
    async with started(store), opened(store, transports=["nixl"]) as backend:
        await fill(backend)
        load, stop = StagedLoad(backend), asyncio.Event()
        assert await load.all_there()
        running = asyncio.create_task(load.run(stop))
        await until(lambda: on_disk(tmp_path / "spill", len(OBJECTS)))
        await asyncio.to_thread(store.freeze)
        await until(load.none_there)
        store.thaw()
        await until(load.all_there)
        await asyncio.to_thread(store.kill)
        await until(load.none_there)
        await asyncio.to_thread(store.start)
        await until(load.all_there)
        stop.set()
        await running
        await until(load.nothing_held)
        assert load.longest < 10.0
        assert load.statuses <= {TransferStatus.OK, TransferStatus.MISSING, TransferStatus.LATE}
        await load.aclose()


async def test_restores_land_in_staging_memory(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session over a pool on NIXL: what a restore loads goes straight into staging memory, not
    one copy is made on the way, and the tokens are those of a cold run."""
    monkeypatch.setenv("UCX_TLS", "all")
    engine: Any = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    store = StoreProcess(tmp_path / "log", arena="16MiB", transports='["nixl"]')
    prompt = [(7 * i) % 311 for i in range(200)]
    async with started(store):
        options = {"peers": [store.address], "transports": ["nixl"]}
        tier = {"name": "pool", "backend": "pool", "options": options}
        settings = Settings(tiers=[tier], staging_bytes=1 << 22, policy="load")
        async with CacheFlow.open(settings, engine=engine) as flow:
            cold = await ask(flow, prompt)
            await flow.flush(10)
            with mock.patch.object(OurMemory, "stopover") as copied:
                report = Generation()
                assert await ask(flow, prompt, report) == cold
            assert report.usage.loaded_tokens == 192
            copied.assert_not_called()
    await engine.aclose()


async def ask(flow: CacheFlow, prompt: list[int], report: Generation | None = None) -> list[int]:
    session = flow.session()
    stream = session.generate(prompt, max_new_tokens=3, report=report)
    tokens = [token async for token in stream]
    await session.forget()
    return tokens


@asynccontextmanager
async def on_device(backend: PoolBackend, nbytes: int) -> AsyncIterator[tuple[Buffer, bytearray]]:
    """Registered memory of the kind DEVICE, and what is in it: NIXL is told that it is the host's,
    everybody else has to leave it alone."""
    memory, hold = bytearray(nbytes), InFlight()
    buffer = replace(buffer_from(memory, hold), kind=MemoryKind.DEVICE, view=None)
    with (
        mock.patch.object(agent, "segment", return_value="DRAM"),
        mock.patch.object(agent, "device_of", return_value=0),
    ):
        end = backend.register_memory(buffer)
        try:
            yield buffer, memory
        finally:
            end()
            await idle(hold)


async def test_loads_into_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on a device is loaded into as it lies, without a stop in memory of the host; where
    the only way to a store cannot, that is a miss, and costs the store nothing."""
    monkeypatch.setenv("UCX_TLS", "all")
    both = StoreProcess(tmp_path / "log", arena="2MiB", transports='["nixl", "tcp"]')
    plain = StoreProcess(tmp_path / "log", arena="2MiB", transports='["tcp"]')
    [stored, *_] = OBJECTS
    patience = {"request_seconds": 10.0, "transfer_seconds": 20.0, "connect_seconds": 10.0}
    async with started(both, plain):
        for store in (both, plain):
            async with (
                opened(store, transports=["nixl", "tcp"], **patience) as backend,
                on_device(backend, len(stored.data)) as (buffer, memory),
            ):
                await store_all(backend, stored)
                with mock.patch.object(OurMemory, "stopover") as copied:
                    [result] = await load_all(backend, [Read(stored.key, 0, buffer)])
                copied.assert_not_called()
                if store is both:
                    assert result.status is TransferStatus.OK
                    assert memory == stored.data
                else:
                    assert result.status is TransferStatus.MISSING
                    assert "host memory only" in str(result.error)
                    assert not any(memory)
                assert len(backend.members.up) == 1
        async with opened(plain) as backend:
            device = Buffer(4096, 4096, MemoryKind.DEVICE, None, InFlight())
            with pytest.raises(ValueError, match="host memory only"):
                await load_all(backend, [Read(stored.key, 0, device)])


async def test_a_fabric_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NIXL is there on both sides and nothing comes through it, the pool goes on over tcp."""
    monkeypatch.setenv("UCX_TLS", "all")
    store = StoreProcess(tmp_path / "log", arena="2MiB", transports='["nixl", "tcp"]')
    async with started(store), opened(store, transports=["nixl", "tcp"]) as backend:

        async def all_stored() -> bool:
            results = await backend.store([each.write() for each in OBJECTS])
            return {result.status for result in results} == {TransferStatus.OK}

        with mock.patch.object(UcxAgent, "begin", side_effect=RuntimeError("no route")):
            await until(all_stored)
            load = StagedLoad(backend)
            assert await load.all_there()
        [peer] = backend.members.up
        assert peer.hello is not None
        assert peer.hello.transport == "tcp"
        await load.aclose()

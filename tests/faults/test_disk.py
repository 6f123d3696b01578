"""Real disks misbehave: killed writers, a full or read-only file system, a folder that goes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.kv import verify
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import load_one, make_object
from cacheflow.types import TileGrid, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GRID = TileGrid((32, 32, 64), 128)

WRITER = """
import asyncio, sys
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import make_object

async def main(folder, seed, count):
    backend = await NvmeBackend.open({"path": folder})
    objects = [make_object(number, seed) for number in range(40)]
    for number in range(count):
        each = objects[number % 40]
        [result] = await backend.store([each.write()])
        print(number % 40 if result.status == "ok" else result, flush=True)
    await backend.aclose()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def writer(folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seed), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )


async def check_whole(folder: Path) -> set[int]:
    """Every listed object is readable and verifies; nothing temporary is left. Their numbers."""
    backend = await NvmeBackend.open({"path": str(folder)})
    numbers = {make_object(number).key: number for number in range(40)}
    found = set()
    async for info in backend.scan():
        result, data = await load_one(backend, info.key, info.payload_offset, info.nbytes - 4096)
        assert result.status is TransferStatus.OK
        verify(info, info.key.layers, memoryview(data))
        found.add(numbers[info.key])
    await backend.aclose()
    assert list((folder / "tmp").iterdir()) == []
    return found


@pytest.mark.allow_blocking  # the test itself waits for processes
async def test_killed_while_storing(tmp_path: Path) -> None:
    """kill -9 at random instants: what was stored is there, nothing half-written is listed, and
    what the dead left behind is removed when the store is next opened."""
    chance = random.Random(3)
    stored: set[int] = set()
    for round_ in range(10):
        process = writer(tmp_path, round_, 100_000)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 60)):
            stored.add(int(process.stdout.readline()))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.random() / 100)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].splitlines(keepends=True)
        stored |= {int(line) for line in rest if line.endswith("\n")}
        found = await check_whole(tmp_path)
        assert stored <= found
        assert len(found - stored) <= 1


@pytest.mark.allow_blocking  # the test itself waits for processes
async def test_two_processes_store_the_same_chunks(tmp_path: Path) -> None:
    """Each object is at any time a whole one of either; a reader never sees a mixture."""
    async_open = await NvmeBackend.open({"path": str(tmp_path)})
    processes = [writer(tmp_path, seed, 600) for seed in (1, 2)]
    versions = [{n: make_object(n, seed).data for n in range(40)} for seed in (1, 2)]
    seen = 0
    while any(process.poll() is None for process in processes):
        number = seen % 40
        for info in (await async_open.lookup([make_object(number).key.chunk]))[0]:
            result, data = await load_one(async_open, info.key, 0, info.nbytes)
            assert result.status is TransferStatus.OK
            assert data in [version[number] for version in versions]
        seen += 1
    for process in processes:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert [line for line in out.split() if not line.isdigit()] == []
    await async_open.aclose()
    assert await check_whole(tmp_path) == set(range(40))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        while folder.is_mount():
            subprocess.run(["umount", "-l", str(folder)], check=True)


async def turns(model: Path, disk: Path, between: Any = None) -> list[Generation]:
    """Two turns of one conversation, forgotten between them; the tokens are those of a run that
    stores nothing."""
    engine = await TransformersEngine.open_model(
        model, dtype="float32", grid=GRID, chunk_tokens=16, kv_bytes=1 << 28
    )
    chance = random.Random(1)
    prompt = [chance.randrange(320) for _ in range(700)]
    options = {"path": str(disk), "max_bytes": 1 << 30, "min_free_bytes": 0}
    tier = {"name": "disk", "backend": "nvme", "options": options}
    settings = Settings(tiers=[tier], staging_bytes=1 << 22)
    reports = [Generation(), Generation()]
    try:
        async with CacheFlow.open(settings, engine=engine) as flow:
            cold = await generate(flow, prompt, Generation(), save=False, policy="recompute")
            assert await generate(flow, prompt, reports[0]) == cold
            await flow.flush()
            if between is not None:
                await asyncio.to_thread(between)
            assert await generate(flow, prompt, reports[1], policy="load") == cold
            await flow.flush()
    finally:
        await engine.aclose()
    return reports


async def generate(
    flow: CacheFlow, prompt: list[int], report: Generation, **options: Any
) -> list[int]:
    session = flow.session("s")
    stream = session.generate(prompt, max_new_tokens=5, report=report, **options)
    tokens = [token async for token in stream]
    await session.forget()
    return tokens


async def test_a_full_disk(model_folder: Path, small_disk: Path) -> None:
    """What fits is stored and restored; the tier evicts for what else comes, and what it cannot
    make room for is counted; nothing half-written stays."""
    objects = small_disk / "store" / "objects"
    there: list[Path] = []
    first, second = await turns(
        model_folder, small_disk / "store", lambda: there.extend(objects.glob("*/*"))
    )
    assert first.saved is not None
    assert first.saved["disk"].stored + first.saved["disk"].dropped == 44
    assert 10 < len(there) <= min(34, first.saved["disk"].stored)
    # The chunk with the prompt's last token cannot be used by the same prompt.
    assert second.cached_tokens >= 16 * (len(there) - 1)
    assert second.restoration is not None
    assert second.restoration.failed_loads == 0
    # All that is there was just looked up: nothing leaves for what is not.
    assert second.saved is not None
    assert second.saved["disk"].kept == len(there)
    assert second.saved["disk"].dropped == 44 - len(there)
    assert list((small_disk / "store" / "tmp").iterdir()) == []


async def test_a_disk_that_becomes_read_only(model_folder: Path, small_disk: Path) -> None:
    """What is there is still served; what is new is dropped and counted."""

    def remount() -> None:  # on top: what is open for writing keeps the disk itself from it
        mount = ["mount", "-o", "bind,ro", str(small_disk), str(small_disk)]
        subprocess.run(mount, check=True)

    _, second = await turns(model_folder, small_disk / "store", remount)
    assert second.cached_tokens > 0
    assert second.saved is not None
    assert second.saved["disk"].stored == 0
    assert second.saved["disk"].dropped > 0


async def test_a_read_only_disk_without_a_store(small_disk: Path) -> None:
    """Opening says that the folder cannot be made."""
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    await asyncio.to_thread(subprocess.run, remount, check=True)
    with pytest.raises(ConfigError, match="cannot be made"):
        await NvmeBackend.open({"path": str(small_disk / "store")})


async def test_a_folder_deleted_under_a_running_store(model_folder: Path, tmp_path: Path) -> None:
    """Everything is a miss from then on, and what is to be stored is dropped (or stored anew)."""
    store = tmp_path / "store"
    _, second = await turns(model_folder, store, lambda: shutil.rmtree(store))
    assert second.restoration is not None
    assert second.restoration.loaded_cells == {}
    assert second.saved is not None
    assert second.saved["disk"].stored + second.saved["disk"].dropped == 44

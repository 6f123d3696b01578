"""What operators of other caches met, and must not meet here: caps, restarts, leaks of files."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.errors import CapacityError, ConfigError
from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend, NvmeOptions
from cacheflow.testing.objects import aligned_buffer, load_one, make_object
from cacheflow.testing.storage_harness import load_all, store_all
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import TransferResult

SIZE = len(make_object(1).data)
GB = 1 << 30


async def open_store(folder: Path, **options: object) -> NvmeBackend:
    return await NvmeBackend.open({"path": str(folder), **options})


def file_of(folder: Path, stored: StoredObject) -> Path:
    name = format_name(stored.key)
    return folder / "objects" / name[:2] / name


def bytes_in(folder: Path) -> int:
    """Of all files but the manifest and the ledger, as `du --apparent-size` counts them."""
    inside = [*(folder / "objects").rglob("*"), *(folder / "tmp").rglob("*")]
    return sum(path.stat().st_size for path in inside if path.is_file())


async def store_one(backend: NvmeBackend, stored: StoredObject) -> TransferResult:
    [result] = await backend.store([stored.write()])
    return result


async def test_accounting_equals_the_files(tmp_path: Path) -> None:
    """Used bytes are those of the files after stores, replacements and deletes by either of two
    backends, and after reopening: nothing but eviction has to happen for bytes to come back."""
    one, two = await open_store(tmp_path), await open_store(tmp_path)
    for number in range(12):
        await store_all(one if number % 2 else two, make_object(number))
    await store_all(two, make_object(3, version=1))
    await one.delete([make_object(4).key, make_object(5).key])
    await two.delete([make_object(5).key, make_object(6).key])
    for backend in (one, two):
        assert await backend.used_bytes() == bytes_in(tmp_path) == 9 * SIZE
    await one.aclose()
    await two.aclose()
    again = await open_store(tmp_path)
    assert await again.used_bytes() == 9 * SIZE
    await again.aclose()


async def test_over_the_cap_is_full(tmp_path: Path) -> None:
    """What does not fit is FULL with a CapacityError that names the option, and deleting by the
    other backend makes room at once."""
    one, two = [await open_store(tmp_path, max_bytes=2 * SIZE) for _ in range(2)]
    await store_all(one, make_object(1), make_object(2))
    for backend in (one, two):
        result = await store_one(backend, make_object(3))
        assert (result.status, result.nbytes) == (TransferStatus.FULL, 0)
        assert isinstance(result.error, CapacityError)
        assert "max_bytes" in str(result.error)
    assert await two.delete([make_object(1).key]) == [True]
    await store_all(one, make_object(3))
    await one.aclose()
    await two.aclose()


async def test_under_the_floor_is_full(tmp_path: Path) -> None:
    """What would leave less free than asked for is FULL with the option's name."""
    backend = await open_store(tmp_path, min_free_bytes=1 << 60)
    result = await store_one(backend, make_object(1))
    assert result.status is TransferStatus.FULL
    assert isinstance(result.error, CapacityError)
    assert "min_free_bytes" in str(result.error)
    assert bytes_in(tmp_path) == 0
    await backend.aclose()


def test_the_defaults_are_safe(tmp_path: Path) -> None:
    """Without options the store takes at most half of the file system and leaves a fifth of it
    free; on one that is nearly full it leaves half of what there is, the same after a restart."""
    options = NvmeOptions(path=tmp_path)
    assert options.cap(1000 * GB) == 500 * GB
    assert options.floor(1000 * GB, free=900 * GB, used=0) == 200 * GB
    assert options.floor(1000 * GB, free=10 * GB, used=0) == 5 * GB
    assert options.floor(1000 * GB, free=5 * GB, used=5 * GB) == 5 * GB
    given = NvmeOptions.parse("nvme", {"path": tmp_path, "max_bytes": "3GiB", "min_free_bytes": 0})
    assert (given.cap(1000 * GB), given.floor(1000 * GB, 10 * GB, 0)) == (3 * GB, 0)


async def test_the_defaults_hold_without_options(tmp_path: Path) -> None:
    """A store opened with its path alone has a cap and a floor."""
    backend = await open_store(tmp_path)
    assert backend._space is not None
    size = await asyncio.to_thread(backend.folder.size_bytes)
    assert 0 < backend._space.cap < size
    assert backend._space.floor > 0
    await backend.aclose()


@pytest.mark.parametrize("option", ["max_bytes", "min_free_bytes"])
async def test_impossible_limits(tmp_path: Path, option: str) -> None:
    """A limit below zero is a ConfigError that names the option."""
    with pytest.raises(ConfigError, match=option):
        await open_store(tmp_path, **{option: -1})


async def test_a_restart_knows_what_is_there(tmp_path: Path) -> None:
    """After a restart everything is served and counted at once: the cap holds, nothing is invisible
    for a while or for ever, nothing has to be warmed up."""
    objects = [make_object(number) for number in range(3)]
    backend = await open_store(tmp_path, max_bytes=3 * SIZE)
    await store_all(backend, *objects)
    await backend.aclose()
    backend = await open_store(tmp_path, max_bytes=3 * SIZE)
    assert (await store_one(backend, make_object(9))).status is TransferStatus.FULL
    for each in objects:
        assert (await load_one(backend, each.key, 0, SIZE))[1] == each.data
    await backend.aclose()


async def test_a_smaller_cap_after_a_restart(tmp_path: Path) -> None:
    """A cap below what is there already takes nothing away; none is added until there is room."""
    backend = await open_store(tmp_path)
    await store_all(backend, make_object(1), make_object(2))
    await backend.aclose()
    backend = await open_store(tmp_path, max_bytes=SIZE)
    assert (await store_one(backend, make_object(3))).status is TransferStatus.FULL
    await backend.delete([make_object(1).key])
    assert (await store_one(backend, make_object(3))).status is TransferStatus.FULL
    await backend.delete([make_object(2).key])
    await store_all(backend, make_object(3))
    await backend.aclose()


async def test_an_object_may_take_the_whole_cap(tmp_path: Path) -> None:
    """One byte less, and it never fits."""
    for cap, status in ((SIZE, TransferStatus.OK), (SIZE - 1, TransferStatus.FULL)):
        backend = await open_store(tmp_path / str(cap), max_bytes=cap)
        assert (await store_one(backend, make_object(1))).status is status
        await backend.aclose()


async def test_damage_behind_the_back_is_counted_at_the_next_opening(tmp_path: Path) -> None:
    """Files that were truncated, added or removed by other means are counted as they are when the
    store is opened by a process that is alone."""
    backend = await open_store(tmp_path)
    await store_all(backend, *(make_object(number) for number in range(3)))
    await backend.aclose()
    os.truncate(file_of(tmp_path, make_object(0)), 100)
    file_of(tmp_path, make_object(1)).unlink()
    (tmp_path / "objects" / "notes.txt").write_text("not an object")
    backend = await open_store(tmp_path)
    assert await backend.used_bytes() == bytes_in(tmp_path) == SIZE + 100 + 13
    await backend.aclose()


async def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    """Reads that fail half-way through a batch, and stores and openings that fail, leak none."""
    stored, absent = make_object(1), make_object(2)
    backend = await open_store(tmp_path / "store", max_bytes=SIZE)
    await store_all(backend, stored)

    async def fail() -> None:
        keys = [stored.key, absent.key] * 10
        await load_all(backend, [Read(key, 0, aligned_buffer(4096)) for key in keys])
        with mock.patch.object(os, "preadv", side_effect=OSError(errno.EIO, "broken")):
            await load_all(backend, [Read(key, 0, aligned_buffer(4096)) for key in keys])
        assert (await store_one(backend, absent)).status is TransferStatus.FULL
        with mock.patch.object(os, "fsync", side_effect=OSError(errno.EIO, "broken")):
            assert (await store_one(backend, stored)).status is not TransferStatus.OK
        with mock.patch.object(os, "ftruncate", side_effect=OSError(errno.ENOLCK, "broken")):
            for each in (tmp_path / "other", tmp_path / "another"):
                with pytest.raises(ConfigError, match="no file locks"):
                    await open_store(each)

    await fail()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing opens one itself
    for _ in range(3):
        await fail()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    await backend.aclose()


async def test_opening_can_be_cancelled_anywhere(tmp_path: Path) -> None:
    """An opening cancelled at any await leaves no place taken: the next one is alone and counts."""
    await (await open_store(tmp_path)).aclose()
    for steps in range(40):
        task = asyncio.ensure_future(open_store(tmp_path))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()
        (tmp_path / "tmp" / "left").touch()
        backend = await open_store(tmp_path)
        assert os.listdir(tmp_path / "tmp") == []  # noqa: PTH208
        await backend.aclose()

"""The nvme backend beyond the contract: faults of the disk, leftovers, O_DIRECT, hung I/O."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from cacheflow.errors import BackendError, ConfigError
from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import listing
from cacheflow.testing.conformance import Pause
from cacheflow.testing.objects import aligned_buffer, load_one, make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.types import Read, TransferStatus
from tests.unit.storage import nvme_stores
from tests.unit.storage.nvme_stores import (
    file_of,
    make_store,
    names_in,
    open_store,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# -- faults of the disk ----------------------------------------------------------------------------


def failing(call: Callable[..., int], code: int, after: int = 0) -> Callable[..., int]:
    """``call`` until ``after`` bytes went through, then a short transfer, then an error."""
    left = after

    def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(code, os.strerror(code))
        done = call(descriptor, [buffers[0][:left]], offset)
        left -= done
        return done

    return fail


@pytest.mark.parametrize("after", [0, 4096, 8192, 12288])
@pytest.mark.parametrize("direct", ["auto", "off"])
async def test_a_full_disk(tmp_path: Path, after: int, direct: str) -> None:
    """A disk that fills up, at once or with a short write, makes a store FULL and temporary; the
    old object stays, nothing temporary is left, the holds are released."""
    old, new = make_object(1), make_object(1, version=1)
    backend = await open_store(tmp_path, direct=direct)
    await store_all(backend, old)
    write = new.write()
    with mock.patch.object(os, "pwritev", failing(os.pwritev, errno.ENOSPC, after)):
        [result] = await backend.store([write])
    assert (result.status, result.nbytes) == (TransferStatus.FULL, 0)
    assert isinstance(result.error, BackendError)
    assert result.error.is_temporary
    assert "No space left" in str(result.error)
    assert names_in(tmp_path / "tmp") == []
    assert all(part.hold.in_flight == 0 for part in write.parts)
    assert await backend.lookup([old.key.chunk]) == [[old.info]]
    await store_all(backend, new)
    await backend.aclose()


async def test_a_folder_in_an_objects_place(tmp_path: Path) -> None:
    """It costs that object, REFUSED with the place, which is no fault of the tier; others go on."""
    odd, good = make_object(1), make_object(2)
    backend = await open_store(tmp_path)
    file_of(tmp_path, odd).mkdir(parents=True)
    results = await backend.store([odd.write(), good.write()])
    assert [result.status for result in results] == [TransferStatus.REFUSED, TransferStatus.OK]
    assert str(file_of(tmp_path, odd)) in str(results[0].error)
    assert await backend.lookup([odd.key.chunk, good.key.chunk]) == [[], [good.info]]
    await backend.aclose()


async def test_a_read_error(tmp_path: Path) -> None:
    """A read that the disk fails is FAILED with the reason; reads beside it are not harmed."""
    stored = make_object(1)
    backend = await open_store(tmp_path)
    await store_all(backend, stored)
    with mock.patch.object(os, "preadv", failing(os.preadv, errno.EIO)):
        result, _ = await load_one(backend, stored.key, 0, 4096)
    assert result.status is TransferStatus.FAILED
    assert isinstance(result.error, BackendError)
    assert result.error.operation == "load"
    assert "Input/output error" in str(result.error)
    result, data = await load_one(backend, stored.key, 0, 4096)
    assert data == stored.data[:4096]
    await backend.aclose()


@pytest.mark.parametrize(
    ("flags", "why"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")]
)
async def test_a_read_only_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: int, why: str
) -> None:
    """A store that can only be read is warned of and serves what it has; a store into it is FAILED,
    a removal an error, and both say why."""
    stored = make_object(1)
    await make_store(tmp_path, stored)
    real = os.open

    def read_only(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode)

    with (
        mock.patch.object(os, "open", read_only),
        mock.patch.object(os, "access", return_value=False),
        mock.patch.object(os, "statvfs", return_value=SimpleNamespace(f_flag=flags)),
    ):
        backend = await open_store(tmp_path)
        _, data = await load_one(backend, stored.key, 0, len(stored.data))
        assert data == stored.data
        [result] = await backend.store([make_object(2).write()])
        assert result.status is TransferStatus.FAILED
        assert why in str(result.error)
        with pytest.raises(BackendError, match=f"^delete: {why}"):
            await backend.delete([stored.key])
        assert f"{tmp_path} can only be read, nothing is stored in it: {why}" in caplog.text
        await backend.aclose()


async def test_what_is_no_plain_file_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link, a pipe or a folder under an object's name is not listed and blocks nobody; it is
    logged once. A file in the wrong folder is no object."""
    linked, pipe, folder, stray = (make_object(number) for number in range(4))
    await make_store(tmp_path, linked, pipe, folder, stray)
    elsewhere = tmp_path / "elsewhere"
    file_of(tmp_path, linked).rename(elsewhere)
    file_of(tmp_path, linked).symlink_to(elsewhere)
    for each in (pipe, folder):
        file_of(tmp_path, each).unlink()
    os.mkfifo(file_of(tmp_path, pipe))
    file_of(tmp_path, folder).mkdir()
    wrong = tmp_path / "objects" / "zz"
    wrong.mkdir()
    file_of(tmp_path, stray).rename(wrong / format_name(stray.key))
    backend = await open_store(tmp_path)
    for _ in range(2):
        found = await backend.lookup([each.key.chunk for each in (linked, pipe, folder, stray)])
        assert found == [[], [], [], []]
        assert [info async for info in backend.scan()] == []
    assert len([record for record in caplog.records if "not a plain file" in record.message]) == 3
    await backend.aclose()


# -- O_DIRECT --------------------------------------------------------------------------------------


def no_direct(call: Callable[..., int]) -> Callable[..., int]:
    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if _is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, buffers, offset)

    return refuse


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


async def test_fallback_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where O_DIRECT is refused only when bytes move, everything still works, with one warning."""
    objects = [make_object(number) for number in range(8)]
    with (
        mock.patch.object(os, "preadv", no_direct(os.preadv)),
        mock.patch.object(os, "pwritev", no_direct(os.pwritev)),
    ):
        backend = await open_store(tmp_path)
        await store_all(backend, *objects)
        for each in objects:
            assert (await load_one(backend, each.key, 0, len(each.data)))[1] == each.data
        await backend.aclose()
    warnings = [record.message for record in caplog.records if "O_DIRECT" in record.message]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]
    assert names_in(tmp_path / "tmp") == []


async def test_direct_can_be_insisted_on(tmp_path: Path) -> None:
    """`direct: on` is a ConfigError where the file system has none."""
    await make_store(tmp_path)
    real = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    with (
        mock.patch.object(os, "open", refusing),
        pytest.raises(ConfigError, match="option direct"),
    ):
        await open_store(tmp_path, direct="on")


async def test_a_short_file_does_not_cost_direct(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading a file that ends amid a page is SHORT, and no reason to give up O_DIRECT."""
    stored = make_object(1)
    await make_store(tmp_path, stored)
    os.truncate(file_of(tmp_path, stored), 9999)
    backend = await open_store(tmp_path)
    result, data = await load_one(backend, stored.key, 0, len(stored.data))
    assert result.status is TransferStatus.SHORT
    assert data == stored.data[:9999]
    assert backend._direct.on
    assert not caplog.records
    await backend.aclose()


async def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Ranges are 64-bit: the end of a 5 GB object is read where it lies."""
    stored = make_object(1)
    await make_store(tmp_path, stored)
    offset = 5 << 30
    with file_of(tmp_path, stored).open("r+b") as file:
        file.seek(offset)
        file.write(b"far away".ljust(4096))
    backend = await open_store(tmp_path)
    _, data = await load_one(backend, stored.key, offset, 4096)
    assert data.startswith(b"far away")
    await backend.aclose()


# -- leftovers, indexes, hung disks ----------------------------------------------------------------


async def test_leftovers_are_removed_once_nobody_is_there(tmp_path: Path) -> None:
    """Whatever lies among the unfinished files is removed by the first process that opens the
    store, and left alone while another one has it open: it may be that one's."""
    backend = await open_store(tmp_path)
    (tmp_path / "tmp" / "what is this").touch()
    await (await open_store(tmp_path)).aclose()
    assert names_in(tmp_path / "tmp") == ["what is this"]
    await backend.aclose()
    await (await open_store(tmp_path)).aclose()
    assert names_in(tmp_path / "tmp") == []


@pytest.mark.parametrize("gone", [("tmp",), ("objects",), ("objects", "tmp")])
async def test_a_store_that_was_cleared_out_goes_on(tmp_path: Path, gone: tuple[str, ...]) -> None:
    """Whoever removes what is in it, by hand or by a job that tidies up, takes folders along; the
    next store makes them again, readable by nobody else."""
    backend = await open_store(tmp_path)
    await store_all(backend, make_object(1))
    for name in gone:
        shutil.rmtree(tmp_path / name)
    await store_all(backend, make_object(2), make_object(1))
    assert len(await backend.files()) == 2
    assert len([info async for info in backend.scan()]) == 2
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("objects", "tmp")] == [0o700] * 2
    assert names_in(tmp_path / "tmp") == []
    await backend.aclose()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
async def test_a_store_that_is_gone_is_not_written_elsewhere(tmp_path: Path, how: str) -> None:
    """What another process has made in its place has a ledger that knows nothing of ours: both
    together would exceed the cap. The error says what to do."""
    folder = tmp_path / "kv"
    backend = await open_store(folder)
    await store_all(backend, make_object(1))
    if how == "removed":
        shutil.rmtree(folder)
    else:
        folder.rename(tmp_path / "elsewhere")
    if how == "replaced":
        await make_store(folder)
    before = await asyncio.to_thread(nvme_stores.listing, tmp_path)
    (result,) = await backend.store([make_object(2).write()])
    assert result.status is TransferStatus.FAILED
    assert "removed, moved or replaced while it was open; start this" in str(result.error)
    assert await asyncio.to_thread(nvme_stores.listing, tmp_path) == before
    await backend.aclose()


async def test_two_writers_of_one_object(tmp_path: Path) -> None:
    """Backends that store the same objects at the same time never disturb each other's files."""
    stores = [await open_store(tmp_path) for _ in range(4)]
    objects = [make_object(number) for number in range(8)]
    for _ in range(3):
        await asyncio.gather(*(store_all(backend, *objects) for backend in stores))
    for each in objects:
        assert (await load_one(stores[0], each.key, 0, len(each.data)))[1] == each.data
    assert names_in(tmp_path / "tmp") == []
    for backend in stores:
        await backend.aclose()


async def test_a_kept_listing_is_noticed_to_be_old(tmp_path: Path) -> None:
    """A folder listing that was kept is not believed once someone else changed the folder."""
    one, two = await open_store(tmp_path), await open_store(tmp_path)
    stored = make_object(1)
    await store_all(one, stored)
    fan = file_of(tmp_path, stored).parent
    os.utime(fan, (time.time() - 60, time.time() - 60))
    assert await one.lookup([stored.key.chunk]) == [[stored.info]]
    with mock.patch.object(os, "listdir", side_effect=AssertionError("listed again")):
        assert await one.lookup([stored.key.chunk]) == [[stored.info]]
    assert await two.delete([stored.key]) == [True]
    assert await one.lookup([stored.key.chunk]) == [[]]
    await one.aclose()
    await two.aclose()


async def test_a_listing_is_kept_though_the_clock_was_ahead(tmp_path: Path) -> None:
    """A folder changed before the clock was set back is stamped with a time to come: it is listed
    until it has stayed as it is for a second, and what others change is noticed as ever."""
    one, two = await open_store(tmp_path), await open_store(tmp_path)
    stored = make_object(1)
    await store_all(one, stored)
    tomorrow = time.time() + 86_400
    os.utime(file_of(tmp_path, stored).parent, (tomorrow, tomorrow))
    clock = mock.Mock(wraps=time)
    with (
        mock.patch.object(listing, "time", clock),
        mock.patch.object(os, "listdir", wraps=os.listdir) as listdir,
    ):
        for seconds, listed in ((5.0, 1), (5.9, 2), (6.1, 3), (6.2, 3), (99.0, 3)):
            clock.monotonic_ns.return_value = int(seconds * 1e9)
            assert await one.lookup([stored.key.chunk]) == [[stored.info]]
            assert listdir.call_count == listed, seconds
        assert await two.delete([stored.key]) == [True]
        assert await one.lookup([stored.key.chunk]) == [[]]
    await one.aclose()
    await two.aclose()


async def test_lookups_do_not_wait_for_hung_reads(tmp_path: Path) -> None:
    """With all reading threads hung in the disk, lookups and scans still answer."""
    objects = [make_object(number) for number in range(8)]
    backend = await open_store(tmp_path, threads=2)
    await store_all(backend, *objects)
    pause, real = Pause(), os.preadv

    def waiting(*arguments: Any) -> int:
        pause.wait()
        return real(*arguments)

    async def load() -> None:
        buffers = [aligned_buffer(4096) for _ in objects]
        reads = [Read(o.key, 0, b) for o, b in zip(objects, buffers, strict=True)]
        assert len([result async for result in backend.load(reads)]) == len(objects)

    with mock.patch.object(os, "preadv", waiting):
        task = asyncio.ensure_future(load())
        await pause.until_began()
        assert await backend.lookup([objects[3].key.chunk]) == [[objects[3].info]]
        assert len([info async for info in backend.scan()]) == 8
        pause.go.set()
        await task
    await backend.aclose()


HUNG = """
import asyncio, os, sys, threading
from pathlib import Path
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import load_one, make_object

async def main():
    backend = await NvmeBackend.open({"path": sys.argv[1]})
    os.preadv = lambda *_: threading.Event().wait()
    task = asyncio.ensure_future(load_one(backend, make_object(1).key, 0, 4096))
    await asyncio.sleep(0.2)
    await backend.aclose()
    print(type((await asyncio.gather(task, return_exceptions=True))[0]).__name__)

asyncio.run(main())
"""


def test_a_hung_disk_holds_up_neither_closing_nor_exit(tmp_path: Path) -> None:
    """A process whose read never comes back closes the store and exits."""
    asyncio.run(make_store(tmp_path, make_object(1)))
    done = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ClosedError\n", done.stderr
    assert done.returncode == 0

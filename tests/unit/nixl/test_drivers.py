"""Files and objects over NIXL's own drivers, with the same links as a store's memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from cacheflow.errors import BackendError, ClosedError, ConfigError
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl import DRIVERS, Driver, NixlStorage
from cacheflow.storage_backends.nixl.agent import device_of, why_missing
from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.testing.s3_server import S3Server
    from cacheflow.types import Buffer

if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)

DATA = hashlib.shake_256(b"a file").digest(3_000_000)
CUDA = Path("/dev/nvidiactl").exists()


@asynccontextmanager
async def storage(driver: Driver | str) -> AsyncIterator[NixlStorage]:
    opened = await NixlStorage.start(driver, slab_bytes=8 << 20)
    try:
        yield opened
    finally:
        await opened.aclose()


def seen(buffer: Buffer) -> bytes:
    assert buffer.view is not None
    return bytes(buffer.view)


def open_count(path: Path) -> int:
    """Descriptors of this process that are of ``path``."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += each.readlink() == path
        except FileNotFoundError:  # the one that lists them
            continue
    return found


async def parted(opened: NixlStorage) -> None:
    """Until the reactor has done what it was asked for."""
    await opened._reactor.call(lambda agent: None)


async def written_and_read(link: NixlLink, again: NixlLink) -> None:
    """Pieces of any length and place, from registered memory and through the slab."""
    pool = StagingPool(4 << 20)
    with await pool.lease(1_000_000) as lease:
        lease.view[:] = DATA[:1_000_000]
        rest = buffer_from(DATA[1_000_000:])
        pieces = [Piece(0, 0, lease.buffer), Piece(1_000_000, 0, rest)]
        await link.write(pieces, deadline=20)
        lease.view[:] = bytes(1_000_000)
        inside = lease.buffer
        memory = memoryview(bytearray(b"\xee" * (70_000 + 64)))
        around = buffer_from(memory[32 : 32 + 70_000])
        await again.read([Piece(999, 0, inside), Piece(2_000_001, 0, around)], deadline=20)
        assert seen(inside) == DATA[999 : 999 + 1_000_000]
        assert seen(around) == DATA[2_000_001:][:70_000]
        assert bytes(memory[:32]) == bytes(memory[-32:]) == b"\xee" * 32
        assert [each.hold.in_flight for each in (inside, around, rest)] == [0, 0, 0]
    await pool.aclose()


@pytest.mark.parametrize("driver", ["posix", "posix-uring"])
async def test_files(driver: str, tmp_path: Path) -> None:
    """What is written over a link is in the file, what is read is what is there, and a file is
    closed with its link or with the storage."""
    path = tmp_path / "object"
    async with storage(driver) as opened:
        link = await opened.open(str(path), len(DATA), writing=True)
        again = await opened.open(str(path), len(DATA))
        assert open_count(path) == 2
        await written_and_read(link, again)
        assert path.read_bytes() == DATA
        with pytest.raises(ValueError, match="not in an arena"):
            await again.read([Piece(len(DATA), 0, buffer_from(bytearray(1)))], deadline=5)
        link.close()
        await parted(opened)
        assert open_count(path) == 1
        with pytest.raises(BackendError, match="closed"):
            await link.read([Piece(0, 0, buffer_from(bytearray(1)))], deadline=5)
    assert open_count(path) == 0
    with pytest.raises(ClosedError):
        await opened.open(str(path), 1)


async def test_staging_memory_goes_as_it_lies(tmp_path: Path) -> None:
    """Memory that was registered is read into without the slab."""
    path = tmp_path / "object"
    path.write_bytes(DATA)
    async with storage("posix") as opened:
        pool = StagingPool(4 << 20)
        opened.register_memory(pool.arena)
        await parted(opened)
        link = await opened.open(str(path), len(DATA))
        opened._memory._slab.try_lease = None  # type: ignore[method-assign,assignment]
        opened._memory._slab.lease = None  # type: ignore[method-assign,assignment]
        with await pool.lease(len(DATA)) as lease:
            await link.read([Piece(0, 0, lease.buffer)], deadline=20)
            assert seen(lease.buffer) == DATA
        await pool.aclose()


async def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A file that is not there, is shorter than it should be, or is none: an error that says which
    and why; nothing stays open."""
    short = tmp_path / "short"
    short.write_bytes(b"123")
    async with storage("posix") as opened:
        for path, nbytes, said in [
            (tmp_path / "none", 1, "No such file"),
            (short, 4, "it has 3 bytes, not 4"),
            (tmp_path, 1, "Is a directory"),
        ]:
            with pytest.raises(BackendError, match=said) as caught:
                await opened.open(str(path), nbytes, writing=path == tmp_path)
            assert caught.value.context == str(path)
            assert open_count(path) == 0
        link = await opened.open(str(short), 3)
        await link.read([Piece(0, 0, buffer := buffer_from(bytearray(3)))], deadline=20)
        assert seen(buffer) == b"123"


async def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """Bytes that are gone by the time they are read fail the read: nothing stale is handed out."""
    path = tmp_path / "object"
    path.write_bytes(DATA)
    async with storage("posix") as opened:
        link = await opened.open(str(path), len(DATA))
        os.truncate(path, 4096)
        with pytest.raises(BackendError, match="NIXL"):
            await link.read([Piece(0, 0, buffer_from(bytearray(8192)))], deadline=20)


@pytest.mark.skipif(CUDA, reason="CUDA is here: the driver may load")
@pytest.mark.parametrize("driver", ["gds", "gds-mt"])
async def test_a_driver_that_cannot_be_loaded_says_what_it_needs(driver: str) -> None:
    """Without GPUDirect Storage: a configuration error that names it, and no thread is left."""
    with pytest.raises(ConfigError, match="libcufile"):
        await NixlStorage.start(driver)


@pytest.mark.skipif(CUDA, reason="CUDA is here")
def test_device_memory_without_cuda() -> None:
    """Memory of the host is on no device; device memory where there is no CUDA is an error."""
    assert device_of(4096, MemoryKind.PINNED) == 0
    with pytest.raises(ConfigError, match="no CUDA driver"):
        device_of(4096, MemoryKind.DEVICE)


ENDS: Final = """
import asyncio
from cacheflow.storage_backends.nixl import NixlTransport

async def main():
    transport = await NixlTransport.open()
    await transport.aclose()

asyncio.run(main())
print("done")
"""


def test_a_process_that_used_nixl_ends_well() -> None:
    """Its exit status is 0: nothing that NIXL brings crashes when it is unloaded."""
    env = {**os.environ, "UCX_TLS": "tcp"}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["done"]), ended.stderr


def test_secrets_are_not_shown() -> None:
    """Parameters of a driver, keys among them, are not in what is printed of it."""
    assert "secret" not in repr(Driver("OBJ", {"secret_key": "secret"}))
    assert not DRIVERS["obj"].has_files
    assert DRIVERS["gds"].has_files


async def test_objects(s3_server: S3Server) -> None:
    """Over S3: what was put is got, and only whole objects are put; a get of more than there is,
    which NIXL calls done, and one of nothing at all, are noticed before."""
    access, secret = s3_server.secrets
    where = {"bucket": s3_server.bucket, "endpoint_override": s3_server.endpoint, "scheme": "http"}
    keys = {"access_key": access, "secret_key": secret, "use_virtual_addressing": "false"}
    async with storage(Driver("OBJ", where | keys)) as opened:
        link = await opened.open("nixl/one", 100_000, writing=True)
        await link.write([Piece(0, 0, buffer_from(DATA[:100_000]))], deadline=30)
        with pytest.raises(BackendError, match="whole"):
            await link.write([Piece(1, 0, buffer_from(DATA[:99_999]))], deadline=30)
        again = await opened.open("nixl/one", 100_000)
        await again.read([Piece(0, 0, buffer := buffer_from(bytearray(100_000)))], deadline=30)
        assert seen(buffer) == DATA[:100_000]
        with pytest.raises(BackendError, match="no such object"):
            await opened.open("nixl/none", 1)
        with pytest.raises(BackendError, match="does not have 100001 bytes"):
            await opened.open("nixl/one", 100_001)

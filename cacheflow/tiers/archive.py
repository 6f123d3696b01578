"""Copying objects between a store and one archive file; every byte is verified on both ways.

::

    magic "CFLWAR1\\n"
    each object: u16 length and ASCII of its name | u64 length and bytes of the object
    end: u16 0 | u64 number of objects

A name is read as a key and nothing else: it never becomes a path. Works on any backend through the
contract; the file is read and written with aiofiles, an object at a time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import struct
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import aiofiles
import aiofiles.os

from cacheflow.errors import BackendError, CapacityError, ConfigError, IntegrityError
from cacheflow.kv import MAX_HEADER_BYTES, decode_header, format_name, parse_name, verify
from cacheflow.memory import StagingPool
from cacheflow.tasks import all_or_nothing, to_the_end
from cacheflow.types import Read, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
    from pathlib import Path

    from aiofiles.threadpool.binary import AsyncBufferedIOBase, AsyncBufferedReader

    from cacheflow.abc import StorageBackend
    from cacheflow.memory import Lease
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = [
    "Archived",
    "ArchiveWriter",
    "Imported",
    "export_objects",
    "import_objects",
    "open_regular",
    "read_archive",
    "write_archive",
]

_MAGIC: Final = b"CFLWAR1\n"
_NAME: Final = struct.Struct("<H")
_SIZE: Final = struct.Struct("<Q")
_MAX_NAME: Final = 160
"""Bytes: more than any object's name has."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the objects of an archive."""

    stored: int
    kept: int
    """Objects that the store has already: replaced only by a canonical copy of one that is not."""
    refused: tuple[tuple[str, str], ...]
    """``(name, reason)`` of objects that are damaged or are not what they are called."""


async def export_objects(
    backend: StorageBackend,
    archive: Path,
    infos: Iterable[ChunkInfo],
    copied: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Copy the objects of ``infos`` into the new file ``archive``; returns how many.

    ``copied`` is told the bytes of each. An object that is gone by now is left out. What fails
    leaves no file.

    Raises:
        BackendError: an object cannot be read.
        ConfigError: ``archive`` exists, or cannot be written.
        IntegrityError: an object's bytes are not what its header says.
    """
    async with write_archive(archive) as writer:
        for info in infos:
            await writer.add(backend, info)
            copied(info.nbytes)
    return writer.count


async def import_objects(
    backend: StorageBackend, archive: Path, copied: Callable[[int], None] = lambda nbytes: None
) -> Imported:
    """Store the objects of ``archive``, each verified whole before it is stored.

    Raises:
        BackendError: the store does not take an object.
        CapacityError: the store is full; what was stored so far stays.
        ConfigError: ``archive`` cannot be read.
        IntegrityError: it is no archive, or one that was cut short; what was stored so far stays.
    """
    stored = kept = 0
    refused: list[tuple[str, str]] = []
    async with aclosing(read_archive(archive)) as objects:
        async for archived in objects:
            try:
                async with archived.read() as (info, data):
                    is_new = await _import(backend, archived.name, info, data)
            except IntegrityError as error:
                refused.append((archived.name, str(error)))
            else:
                stored, kept = stored + is_new, kept + (not is_new)
            copied(archived.nbytes)
    return Imported(stored, kept, tuple(refused))


class ArchiveWriter:
    """Adds objects to a file that is being written: see :func:`write_archive`."""

    def __init__(self, file: AsyncBufferedIOBase) -> None:
        self.count = 0
        self._file = file

    async def add(self, backend: StorageBackend, info: ChunkInfo) -> bool:
        """Copy one object, verified; False if it is gone by now.

        Raises:
            BackendError: it cannot be read.
            IntegrityError: its bytes are not what its header says.
        """
        pool = StagingPool(info.nbytes)
        try:
            with await pool.lease(info.nbytes) as lease:
                async for result in backend.load([Read(info.key, 0, lease.buffer)]):
                    if result.status is TransferStatus.MISSING:
                        return False
                    if result.status is not TransferStatus.OK:
                        raise result.error or BackendError(
                            result.status, operation="load", context=format_name(info.key)
                        )
                await asyncio.to_thread(_verify_whole, info.key, lease.view)
                name = format_name(info.key).encode()
                await self._file.write(_NAME.pack(len(name)) + name + _SIZE.pack(info.nbytes))
                await self._file.write(lease.view)
        finally:
            await pool.aclose()
        self.count += 1
        return True


@asynccontextmanager
async def write_archive(archive: Path) -> AsyncIterator[ArchiveWriter]:
    """A new file to add objects to. What fails leaves no file.

    Raises:
        ConfigError: ``archive`` exists, or cannot be written.
    """
    _check(archive)
    try:
        file = await all_or_nothing(
            aiofiles.open(archive, "xb", opener=_private), partial(_discard, archive)
        )
        try:
            await file.write(_MAGIC)
            writer = ArchiveWriter(file)
            yield writer
            await file.write(_NAME.pack(0) + _SIZE.pack(writer.count))
            await to_the_end(file.close())  # which writes what is left: it can fail like a write
        except BaseException:
            await to_the_end(_discard(archive, file))
            raise
    except OSError as error:
        raise ConfigError(f"export to {archive}: {error.strerror}") from error


async def _discard(archive: Path, file: AsyncBufferedIOBase) -> None:
    with suppress(OSError):  # a full disk's, once more
        await file.close()
    with suppress(OSError):
        await aiofiles.os.unlink(archive)


class Archived:
    """One object of an archive that is being read."""

    def __init__(self, file: AsyncBufferedReader, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._file = file

    @asynccontextmanager
    async def read(self) -> AsyncIterator[tuple[ChunkInfo, Lease]]:
        """Its header and all its bytes, verified.

        Raises:
            IntegrityError: it is damaged, or is not what it is called.
        """
        try:
            key = parse_name(self.name)
        except ValueError as error:
            raise IntegrityError(str(error)) from None
        if not self.nbytes:
            raise IntegrityError("the object is empty")
        await self._check_size(key)
        pool = StagingPool(self.nbytes)
        try:
            with await pool.lease(self.nbytes) as lease:
                if await self._file.readinto(lease.view) != self.nbytes:
                    raise IntegrityError("truncated while it was read")
                yield await asyncio.to_thread(_verify_whole, key, lease.view), lease
        finally:
            await pool.aclose()

    async def _check_size(self, key: ObjectKey) -> None:
        """Before there is memory for it: a file with holes can claim any."""
        start = await self._file.tell()
        info = decode_header(await self._file.read(min(self.nbytes, MAX_HEADER_BYTES)), expect=key)
        if info.nbytes != self.nbytes:
            raise IntegrityError(f"{self.nbytes} bytes, its header says {info.nbytes}")
        await self._file.seek(start)


async def read_archive(archive: Path) -> AsyncGenerator[Archived, None]:
    """The objects of ``archive`` one by one, each to be read before the next one is asked for.

    Raises:
        ConfigError: ``archive`` cannot be read, or is no regular file.
        IntegrityError: it is no archive, or one that was cut short.
    """
    _check(archive)
    try:
        file = await all_or_nothing(
            aiofiles.open(archive, "rb", opener=open_regular), lambda opened: opened.close()
        )
        try:
            left = await asyncio.to_thread(_size_of, file.fileno())
            async with aclosing(_entries(file, left)) as entries:
                async for name, size in entries:
                    yield Archived(file, name, size)
        finally:
            await to_the_end(file.close())
    except OSError as error:
        raise ConfigError(f"import from {archive}: {error.strerror}") from error
    except IntegrityError as error:  # of its entries: of an object's bytes their reader hears
        raise IntegrityError(f"import from {archive}: {error}") from None


def _check(archive: Path) -> None:
    if "\0" in str(archive):
        raise ConfigError(f"{str(archive)!r} is no path: it holds a NUL")


async def _entries(file: AsyncBufferedReader, left: int) -> AsyncGenerator[tuple[str, int], None]:
    """Names and sizes, with the file at the object's bytes; goes on behind them."""
    if await file.read(len(_MAGIC)) != _MAGIC:
        raise IntegrityError("it is no archive of CacheFlow objects, or of another version")
    count = 0
    while True:
        (length,) = _NAME.unpack(await _exactly(file, _NAME.size, count))
        if length > _MAX_NAME:
            raise IntegrityError(f"damaged after {count} objects: a name of {length} bytes")
        name = (await _exactly(file, length, count)).decode("ascii", "replace")
        (size,) = _SIZE.unpack(await _exactly(file, _SIZE.size, count))
        if not length:
            break
        at = await file.tell()
        if size > left - at:
            raise IntegrityError(f"cut short after {count} objects")
        yield name, size
        count += 1
        await file.seek(at + size)
    if size != count:
        raise IntegrityError(f"{count} objects are there, {size} were exported")


async def _exactly(file: AsyncBufferedReader, nbytes: int, count: int) -> bytes:
    data = await file.read(nbytes)
    if len(data) != nbytes:
        raise IntegrityError(f"cut short after {count} objects")
    return data


async def _import(backend: StorageBackend, name: str, info: ChunkInfo, lease: Lease) -> bool:
    if await _has_as_good(backend, info):
        return False
    header = lease.part(0, info.payload_offset)
    payload = lease.part(info.payload_offset, info.nbytes - info.payload_offset)
    [result] = await backend.store([Write(info, (header, payload))])
    if result.status is TransferStatus.FULL:
        raise CapacityError(f"import of {name}: the store is full ({result.error})")
    if result.status is not TransferStatus.OK:
        raise result.error or BackendError(result.status, operation="store", context=name)
    return True


async def _has_as_good(backend: StorageBackend, info: ChunkInfo) -> bool:
    [there] = await backend.lookup([info.key.chunk])
    ours = (info.canonical, not info.lossy)
    return any(old.key == info.key and (old.canonical, not old.lossy) >= ours for old in there)


def open_regular(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`. A pipe without a writer would block whoever opens it, and
    with him the end of the process; a device may have no end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def _size_of(file: int) -> int:
    return os.fstat(file).st_size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _verify_whole(key: ObjectKey, data: memoryview) -> ChunkInfo:
    info = decode_header(data, expect=key)
    if info.nbytes != len(data):
        raise IntegrityError(f"{len(data)} bytes, its header says {info.nbytes}")
    verify(info, key.layers, data[info.payload_offset :])
    return info

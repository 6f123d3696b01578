"""Copying objects between a store and a plain folder: one file each, named by its key.

Works on any backend through the contract. Every byte is verified on the way out and on the way in;
files are read and written with aiofiles, an object at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiofiles
import aiofiles.os

from cacheflow.errors import BackendError, CapacityError, ConfigError, IntegrityError
from cacheflow.kv import decode_header, format_name, parse_name, verify
from cacheflow.memory import StagingPool
from cacheflow.types import Read, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey

__all__ = ["Imported", "export_objects", "import_objects"]


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of the files of a folder."""

    stored: int
    kept: int
    """Objects that the store has already: replaced only by a canonical copy of one that is not."""
    refused: tuple[tuple[str, str], ...]
    """``(file name, reason)`` of object files that are damaged or are not what they are called."""
    ignored: int
    """Files that are no objects by their name."""


async def export_objects(
    backend: StorageBackend, folder: Path, keys: Sequence[ChunkKey] | None = None
) -> int:
    """Copy the objects of ``keys`` (default: all) into ``folder``; returns how many.

    Raises:
        BackendError: an object cannot be read.
        ConfigError: ``folder`` cannot be made or written, or one of the files exists already.
        IntegrityError: an object's bytes are not what its header says.
    """
    count = 0
    try:
        await aiofiles.os.makedirs(folder, mode=0o700, exist_ok=True)
        async with aclosing(_objects(backend, keys)) as infos:
            async for info in infos:
                await _export(backend, info, folder / format_name(info.key))
                count += 1
    except OSError as error:
        raise ConfigError(f"export to {folder}: {error.strerror} ({error.filename})") from error
    return count


async def import_objects(backend: StorageBackend, folder: Path) -> Imported:
    """Store the objects that lie in ``folder``, each verified whole before it is stored.

    Raises:
        BackendError: the store does not take an object.
        CapacityError: the store is full; what was stored so far stays.
        ConfigError: ``folder`` cannot be read.
    """
    stored = kept = ignored = 0
    refused: list[tuple[str, str]] = []
    try:
        names = sorted(await aiofiles.os.listdir(folder))
        for name in names:
            try:
                key = parse_name(name)
            except ValueError:
                ignored += 1
                continue
            try:
                is_new = await _import(backend, key, folder / name)
            except IntegrityError as error:
                refused.append((name, str(error)))
                continue
            stored, kept = stored + is_new, kept + (not is_new)
    except OSError as error:
        raise ConfigError(f"import from {folder}: {error.strerror} ({error.filename})") from error
    return Imported(stored, kept, tuple(refused), ignored)


async def _objects(
    backend: StorageBackend, keys: Sequence[ChunkKey] | None
) -> AsyncGenerator[ChunkInfo, None]:
    if keys is None:
        async for info in backend.scan():
            yield info
    else:
        for infos in await backend.lookup(keys):
            for info in infos:
                yield info


async def _export(backend: StorageBackend, info: ChunkInfo, path: Path) -> None:
    pool = StagingPool(info.nbytes)
    try:
        with await pool.lease(info.nbytes) as lease:
            async for result in backend.load([Read(info.key, 0, lease.buffer)]):
                if result.status is not TransferStatus.OK:
                    raise result.error or BackendError(
                        result.status, operation="load", context=format_name(info.key)
                    )
            await asyncio.to_thread(_verify_whole, info.key, lease.view)
            async with aiofiles.open(path, "xb") as file:
                await file.write(lease.view)
    finally:
        await pool.aclose()


async def _import(backend: StorageBackend, key: ObjectKey, path: Path) -> bool:
    size = (await aiofiles.os.stat(path)).st_size
    if not size:
        raise IntegrityError("truncated: the file is empty")
    pool = StagingPool(size)
    try:
        with await pool.lease(size) as lease:
            async with aiofiles.open(path, "rb") as file:
                if await file.readinto(lease.view) != size:
                    raise IntegrityError("truncated while it was read")
            info = await asyncio.to_thread(_verify_whole, key, lease.view)
            if await _has_as_good(backend, info):
                return False
            header = lease.part(0, info.payload_offset)
            payload = lease.part(info.payload_offset, size - info.payload_offset)
            [result] = await backend.store([Write(info, (header, payload))])
    finally:
        await pool.aclose()
    if result.status is TransferStatus.FULL:
        raise CapacityError(f"import of {path.name}: the store is full ({result.error})")
    if result.status is not TransferStatus.OK:
        raise result.error or BackendError(result.status, operation="store", context=path.name)
    return True


async def _has_as_good(backend: StorageBackend, info: ChunkInfo) -> bool:
    [there] = await backend.lookup([info.key.chunk])
    return any(old.key == info.key and old.canonical >= info.canonical for old in there)


def _verify_whole(key: ObjectKey, data: memoryview) -> ChunkInfo:
    info = decode_header(data, expect=key)
    if info.nbytes != len(data):
        raise IntegrityError(f"{len(data)} bytes, its header says {info.nbytes}")
    verify(info, key.layers, data[info.payload_offset :])
    return info

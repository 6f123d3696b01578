"""The nvme backend: the contract on top of folder, files and header index.

All file calls run on daemon I/O threads. An object appears by rename when it is complete, so a
reader sees a whole old one, a whole new one, or none.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, ClassVar, Self

import aiofiles

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, ClosedError, ConfigError, IntegrityError
from cacheflow.storage_backends.loading import load_on_threads
from cacheflow.storage_backends.nvme.files import DirectIo, aligned, read_range, write_new
from cacheflow.storage_backends.nvme.folder import MANIFEST, StoreFolder
from cacheflow.storage_backends.nvme.index import HeaderIndex
from cacheflow.storage_backends.nvme.listing import Listing
from cacheflow.storage_backends.nvme.settings import NvmeOptions
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.types import Capabilities, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, Write

__all__ = ["NvmeBackend"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 1.0
_SCAN_BATCH = 256


class NvmeBackend(StorageBackend):
    """Use :meth:`open`; one instance may be used by one event loop, a folder by many processes."""

    name: ClassVar[str] = "nvme"

    def __init__(self, options: NvmeOptions, folder: StoreFolder) -> None:
        self.options = options
        self.folder = folder
        self.capabilities = Capabilities(
            persistent=True, shared=True, suggested_depth=options.threads
        )
        self._direct = DirectIo(folder.root, options.direct != "off")
        self._threads = IoThreads(options.threads, "cacheflow-nvme")
        self._index = HeaderIndex()
        self._listing = Listing(folder)
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """See :class:`NvmeOptions`. A folder that is not a store is refused and left as it is."""
        parsed = NvmeOptions.parse(cls.name, options)
        folder = StoreFolder(parsed.path.expanduser().absolute())
        backend = cls(parsed, folder)
        try:
            await backend._prepare()
        except BaseException:
            await backend.aclose()
            raise
        return backend

    async def _prepare(self) -> None:
        folder = self.folder
        manifest = folder.root / MANIFEST
        if await self._threads.run(lambda: folder.check_is_free_or_ours(self.options.create)):
            async with aiofiles.open(manifest, encoding="utf-8") as file:
                folder.check_manifest(await file.read())
        else:
            await self._threads.run(folder.make)
            await self._write_manifest(manifest)
        folder.writable = os.access(folder.root, os.W_OK)
        if folder.writable:
            await self._threads.run(folder.make)
            reaped = await self._threads.run(folder.reap_temporaries)
            if reaped:
                _log.info("%s: removed %d unfinished files", folder.root, reaped)
        if self.options.direct == "on":
            await self._threads.run(self._insist_on_direct)

    async def _write_manifest(self, manifest: Path) -> None:
        temporary = self.folder.new_temporary()
        try:
            async with aiofiles.open(temporary, "x", encoding="utf-8") as file:
                await file.write(self.folder.manifest())
            await self._threads.run(lambda: os.replace(temporary, manifest))
        except OSError as error:
            raise ConfigError(f"{self.folder.root} cannot be written: {error.strerror}") from error

    def _insist_on_direct(self) -> None:
        probe = self.folder.root / MANIFEST
        try:
            os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"{self.folder.root}: the file system has no O_DIRECT and option direct is 'on'"
            ) from error

    # -- contract ------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        self._check()
        found: list[Sequence[ChunkInfo]] = await self._threads.run(
            lambda: [self._objects_of(key) for key in keys]
        )
        return found

    async def load(self, reads: Sequence[Read]) -> AsyncIterator[TransferResult]:
        self._check()
        async with aclosing(load_on_threads(self._threads, reads, self._read)) as results:
            async for result in results:
                yield result

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        for write in writes:
            for part in write.parts:
                part.hold.acquire()
        jobs = [
            self._threads.submit(
                lambda write=write: self._write_and_release(write),
                abandoned=lambda write=write: _release(write),
            )
            for write in writes
        ]
        try:
            return list(await asyncio.gather(*(asyncio.shield(job.done) for job in jobs)))
        except BaseException:
            for job in jobs:
                job.withdraw()
            raise

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        removed: list[bool] = await self._threads.run(lambda: [self._remove(key) for key in keys])
        return removed

    async def scan(self) -> AsyncIterator[ChunkInfo]:
        self._check()
        invalid = 0
        names = await self._threads.run(lambda: list(self.folder.all()))
        for at in range(0, len(names), _SCAN_BATCH):
            batch = names[at : at + _SCAN_BATCH]
            infos = await self._threads.run(lambda batch=batch: [self._valid(*n) for n in batch])
            for info in infos:
                if info is None:
                    invalid += 1
                else:
                    yield info
        if invalid:
            _log.warning("%s: %d files are not valid objects", self.folder.root, invalid)

    async def used_bytes(self) -> int:
        def measure() -> int:
            total = 0
            for _, path in self.folder.all():
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
            return total

        used: int = await self._threads.run(measure)
        return used

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if not await self._threads.aclose(_CLOSE_SECONDS):
                _log.error("%s: closed with I/O still hung in the kernel", self.folder.root)

    # -- on I/O threads ------------------------------------------------------------------------

    def _objects_of(self, chunk: ChunkKey) -> list[ChunkInfo]:
        found = (self._valid(key, path) for key, path in self._listing.objects(chunk))
        return [info for info in found if info is not None]

    def _valid(self, key: ObjectKey, path: Path) -> ChunkInfo | None:
        try:
            return self._index.get(key, path)
        except IntegrityError as error:
            _log.warning("%s is not served: %s", path.name, error)
        except OSError as error:
            _log.warning("%s cannot be read: %s", path.name, error)
        return None

    def _read(self, read: Read) -> tuple[TransferStatus, int]:
        path = self.folder.path(read.key)
        try:
            if aligned(read.buffer, read.offset):
                descriptor = self._direct.open(path, os.O_RDONLY)
            else:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return TransferStatus.MISSING, 0
        try:
            count = read_range(descriptor, read.buffer, read.offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct.on:
                raise
            self._direct.refuse()
            return self._read(read)
        finally:
            os.close(descriptor)
        ok = count == read.buffer.nbytes
        return (TransferStatus.OK if ok else TransferStatus.SHORT), count

    def _write_and_release(self, write: Write) -> TransferResult:
        start = time.monotonic()
        try:
            self._write(write)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            status = TransferStatus.FULL if full else TransferStatus.FAILED
            failure = BackendError(
                error.strerror or str(error),
                operation="store",
                context=str(self.folder.root),
                is_temporary=full,
            )
            return TransferResult(write, status, 0, time.monotonic() - start, failure)
        finally:
            _release(write)
        seconds = time.monotonic() - start
        return TransferResult(write, TransferStatus.OK, write.nbytes, seconds)

    def _write(self, write: Write) -> None:
        path, temporary = self.folder.path(write.info.key), self.folder.new_temporary()
        try:
            write_new(self._direct, temporary, write.parts, fsync=self.options.fsync)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._index.forget(path)
        self._listing.forget(write.info.key.chunk)
        if self.options.fsync:
            _sync_folder(path.parent)

    def _remove(self, key: ObjectKey) -> bool:
        path = self.folder.path(key)
        self._index.forget(path)
        self._listing.forget(key.chunk)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise BackendError(
                error.strerror or str(error), operation="delete", context=str(path)
            ) from error
        return True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the nvme tier at {self.folder.root} is closed")


def _release(write: Write) -> None:
    for part in write.parts:
        part.hold.release()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

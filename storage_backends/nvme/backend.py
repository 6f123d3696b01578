"""The nvme backend: the contract on top of folder, files and header index.

All file calls run on daemon I/O threads, those on names and headers on threads of their own, so
that a lookup does not queue behind reads. An object appears by rename when it is complete: a reader
sees a whole old one, a whole new one, or none.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, ClosedError, IntegrityError
from cacheflow.storage_backends.checks import check_reads, check_writes
from cacheflow.storage_backends.exchange import Imported, export_objects, import_objects
from cacheflow.storage_backends.loading import load_on_threads
from cacheflow.storage_backends.nvme.files import DirectIo, read_file, sync_folder, write_new
from cacheflow.storage_backends.nvme.folder import StoreFolder
from cacheflow.storage_backends.nvme.index import HeaderIndex
from cacheflow.storage_backends.nvme.listing import Listing
from cacheflow.storage_backends.nvme.opening import prepare
from cacheflow.storage_backends.nvme.settings import NvmeOptions
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.types import Capabilities, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, Write

__all__ = ["NvmeBackend"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 1.0
_SCAN_BATCH: Final = 64
_NAME_THREADS: Final = 2
_MAX_REPORTED: Final = 10_000


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
        self._names = IoThreads(_NAME_THREADS, "cacheflow-nvme-names")
        self._index = HeaderIndex()
        self._listing = Listing(folder)
        self._reported: set[Path] = set()
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """See :class:`NvmeOptions`. A folder that is not a store is refused and left as it is."""
        parsed = NvmeOptions.parse(cls.name, options)
        folder = StoreFolder(parsed.path.expanduser().absolute())
        backend = cls(parsed, folder)
        try:
            await prepare(folder, parsed, backend._names)
        except BaseException:
            await backend.aclose()
            raise
        return backend

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        self._check()
        found: list[Sequence[ChunkInfo]] = await self._names.run(
            lambda: [self._objects_of(key) for key in keys]
        )
        return found

    async def load(self, reads: Sequence[Read]) -> AsyncIterator[TransferResult]:
        self._check()
        check_reads(reads)
        async with aclosing(load_on_threads(self._threads, reads, self._read)) as results:
            async for result in results:
                yield result

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        check_writes(writes)
        for write in writes:
            for part in write.parts:
                part.hold.acquire()
        start = time.monotonic()
        jobs = [
            self._threads.start(
                partial(self._write_and_release, write, start), partial(_release, write)
            )
            for write in writes
        ]
        try:
            return list(await asyncio.gather(*(asyncio.shield(job.done) for job in jobs)))
        except BaseException:
            for job in jobs:
                self._threads.withdraw(job)
            raise

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        removed: list[bool] = await self._names.run(lambda: [self._remove(key) for key in keys])
        return removed

    async def scan(self) -> AsyncIterator[ChunkInfo]:
        self._check()
        names = await self._names.run(lambda: list(self.folder.all()))
        for at in range(0, len(names), _SCAN_BATCH):
            batch = names[at : at + _SCAN_BATCH]
            infos = await self._names.run(partial(self._valid_of, batch))
            for info in infos:
                yield info

    async def used_bytes(self) -> int:
        """Bytes of all object files, those that turned out invalid included."""
        self._check()

        def measure() -> int:
            total = 0
            for _, path in self.folder.all():
                with suppress(FileNotFoundError):
                    total += path.lstat().st_size
            return total

        used: int = await self._names.run(measure)
        return used

    async def export_objects(self, folder: Path, keys: Sequence[ChunkKey] | None = None) -> int:
        """Copy the objects of ``keys`` (default: all) into ``folder``, one verified file each.

        Returns how many. Raises ConfigError if one of the files exists, IntegrityError for an
        object whose bytes are not what its header says.
        """
        return await export_objects(self, folder, keys)

    async def import_objects(self, folder: Path) -> Imported:
        """Store the objects that lie in ``folder``, each verified whole before it is stored."""
        return await import_objects(self, folder)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            pools = (self._threads, self._names)
            ended = await asyncio.gather(*(pool.aclose(_CLOSE_SECONDS) for pool in pools))
            if not all(ended):
                _log.error("%s: closed with I/O still hung in the kernel", self.folder.root)

    # -- on I/O threads ------------------------------------------------------------------------

    def _objects_of(self, chunk: ChunkKey) -> list[ChunkInfo]:
        return self._valid_of(self._listing.objects(chunk))

    def _valid_of(self, names: Sequence[tuple[ObjectKey, Path]]) -> list[ChunkInfo]:
        found = (self._valid(key, path) for key, path in names)
        return [info for info in found if info is not None]

    def _valid(self, key: ObjectKey, path: Path) -> ChunkInfo | None:
        try:
            return self._index.get(key, path)
        except (IntegrityError, OSError) as error:
            # Once a file: it is asked for again at every lookup of its chunk.
            if path not in self._reported and len(self._reported) < _MAX_REPORTED:
                self._reported.add(path)
                _log.warning("%s is not served: %s", path, error)
        return None

    def _read(self, read: Read) -> tuple[TransferStatus, int]:
        try:
            count = read_file(self._direct, self.folder.path(read.key), read.buffer, read.offset)
        except FileNotFoundError:
            return TransferStatus.MISSING, 0
        ok = count == read.buffer.nbytes
        return (TransferStatus.OK if ok else TransferStatus.SHORT), count

    def _write_and_release(self, write: Write, start: float) -> TransferResult:
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
        fsync = self.options.fsync
        try:
            write_new(self._direct, temporary, write.parts, fsync=fsync)
            is_new_folder = not path.parent.exists()
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._index.forget(path)
        self._listing.forget(write.info.key.chunk)
        if fsync:
            sync_folder(path.parent)
        if fsync and is_new_folder:
            sync_folder(self.folder.objects)

    def _remove(self, key: ObjectKey) -> bool:
        path = self.folder.path(key)
        self._index.forget(path)
        self._listing.forget(key.chunk)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            reason = error.strerror or str(error)
            raise BackendError(reason, operation="delete", context=str(path)) from error
        return True

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the nvme tier at {self.folder.root} is closed")


def _release(write: Write) -> None:
    for part in write.parts:
        part.hold.release()

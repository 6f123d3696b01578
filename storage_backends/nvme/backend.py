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
from collections import deque
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, CapacityError, ClosedError, IntegrityError
from cacheflow.storage_backends.checks import check_reads, check_writes
from cacheflow.storage_backends.loading import load_on_threads
from cacheflow.storage_backends.nvme.files import DirectIo, read_file, sync_folder, write_new
from cacheflow.storage_backends.nvme.folder import StoreFolder
from cacheflow.storage_backends.nvme.index import HeaderIndex
from cacheflow.storage_backends.nvme.ledger import Ledger
from cacheflow.storage_backends.nvme.listing import Listing
from cacheflow.storage_backends.nvme.opening import join, prepare, room_of
from cacheflow.storage_backends.nvme.settings import NvmeOptions
from cacheflow.storage_backends.storing import store_on_threads
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.tiers import Imported, export_objects, import_objects
from cacheflow.types import Capabilities, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from pathlib import Path

    from cacheflow.errors import CacheFlowError
    from cacheflow.storage_backends.nvme.folder import FoundFile
    from cacheflow.storage_backends.nvme.space import Room, Space
    from cacheflow.storage_backends.threads import FutureJob
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, TransferResult, Write

__all__ = ["NvmeBackend"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 1.0
_SCAN_BATCH: Final = 64
_SCAN_AHEAD: Final = 1
"""Batches of headers read while one is being consumed; a thread is left for lookups."""
_TELL_SECONDS: Final = 2.0
_NAME_THREADS: Final = 3
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
        self._ledger = Ledger(folder.ledger)
        self._space: Space | None = None
        """None while the folder can only be read."""
        self._refusal = 0
        """Why it can only be read, as an ``errno``."""
        self._reported: set[str] = set()
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """See :class:`NvmeOptions`. A folder that is not a store is refused and left as it is."""
        parsed = NvmeOptions.parse(cls.name, options)
        folder = StoreFolder(parsed.path.expanduser().absolute())
        backend = cls(parsed, folder)
        try:
            backend._refusal = await prepare(folder, parsed, backend._names)
            if not backend._refusal:
                backend._space = await join(folder, parsed, backend._ledger, backend._names)
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

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._check()
        check_reads(reads)
        async with aclosing(load_on_threads(self._threads, reads, self._read)) as results:
            async for result in results:
                yield result

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        check_writes(writes)
        return await store_on_threads(self._threads, writes, self._put)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        removed: list[bool] = await self._names.run(lambda: [self._remove(key) for key in keys])
        return removed

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        names = await self._names.run(lambda: list(self.folder.all()))
        batches = [names[at : at + _SCAN_BATCH] for at in range(0, len(names), _SCAN_BATCH)]
        ahead: deque[FutureJob] = deque()
        told = time.monotonic()
        try:
            for number, batch in enumerate([*batches, *[()] * _SCAN_AHEAD]):
                ahead.append(self._names.start(partial(self._valid_of, batch)))
                if len(ahead) <= _SCAN_AHEAD:
                    continue
                for info in await asyncio.shield(ahead.popleft().done):
                    yield info
                if time.monotonic() - told > _TELL_SECONDS:
                    told = time.monotonic()
                    done = min(len(names), (number + 1) * _SCAN_BATCH)
                    _log.info("%s: read %d of %d headers", self.folder.root, done, len(names))
        finally:
            for job in ahead:
                self._names.withdraw(job)

    async def used_bytes(self) -> int:
        """Bytes of all files of the store, unfinished and invalid ones included.

        Exact for what any process does through the store; what happens behind its back is seen
        when a process that is alone opens it.
        """
        self._check()
        used: int = await self._names.run(self._used)
        return used

    # -- for operators ---------------------------------------------------------------------------

    async def room(self) -> Room:
        """What is used of what may be used."""
        self._check()
        room: Room = await self._names.run(lambda: room_of(self.folder, self.options, self._used()))
        return room

    async def files(self) -> list[FoundFile]:
        """Every file of the store but the manifest and the ledger, whether an object or not."""
        self._check()
        files: list[FoundFile] = await self._names.run(lambda: list(self.folder.files()))
        return files

    async def export_objects(
        self,
        archive: Path,
        infos: Sequence[ChunkInfo],
        copied: Callable[[int], None] = lambda nbytes: None,
    ) -> int:
        """Copy objects into a new file: see :func:`cacheflow.tiers.export_objects`."""
        return await export_objects(self, archive, infos, copied)

    async def import_objects(
        self, archive: Path, copied: Callable[[int], None] = lambda nbytes: None
    ) -> Imported:
        """Store the objects of a file: see :func:`cacheflow.tiers.import_objects`."""
        return await import_objects(self, archive, copied)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        ended = await self._threads.aclose(_CLOSE_SECONDS)
        leave = self._ledger.close if self._space is None else self._space.leave
        with suppress(TimeoutError):
            await asyncio.wait_for(self._names.run(leave), _CLOSE_SECONDS)
        ended &= await self._names.aclose(_CLOSE_SECONDS)
        if not ended:
            _log.error("%s: closed with I/O still hung in the kernel", self.folder.root)

    # -- on I/O threads ------------------------------------------------------------------------

    def _objects_of(self, chunk: ChunkKey) -> list[ChunkInfo]:
        return self._valid_of(self._listing.objects(chunk))

    def _valid_of(self, names: Sequence[tuple[ObjectKey, str]]) -> list[ChunkInfo]:
        found = (self._valid(key, path) for key, path in names)
        return [info for info in found if info is not None]

    def _valid(self, key: ObjectKey, path: str) -> ChunkInfo | None:
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

    def _used(self) -> int:
        if self._space is not None:
            return self._space.used()
        return sum(file.nbytes for file in self.folder.files())

    def _put(self, write: Write) -> tuple[TransferStatus, CacheFlowError | None]:
        try:
            self._write(write)
        except CapacityError as error:
            return TransferStatus.FULL, error
        except IsADirectoryError as error:  # somebody made it by hand: it costs this object
            return TransferStatus.REFUSED, self._failure(error, "store", str(error.filename))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            failure = self._failure(error, "store", str(self.folder.root), is_temporary=full)
            return TransferStatus.FULL if full else TransferStatus.FAILED, failure
        return TransferStatus.OK, None

    def _write(self, write: Write) -> None:
        path, fsync = self.folder.path(write.info.key), self.options.fsync
        is_new_folder = not path.parent.exists()

        def fill(temporary: Path) -> None:
            write_new(self._direct, temporary, write.parts, fsync=fsync)
            path.parent.mkdir(mode=0o700, exist_ok=True)

        def fill_anew(temporary: Path) -> None:
            try:
                fill(temporary)
            except FileNotFoundError:
                self.folder.remake()
                with suppress(FileNotFoundError):
                    temporary.unlink()
                fill(temporary)

        try:
            self._writable().put(path, write.nbytes, fill_anew)
        finally:
            self._forget(write.info.key, path)
        if fsync:
            sync_folder(path.parent)
        if fsync and is_new_folder:
            sync_folder(self.folder.objects)

    def _remove(self, key: ObjectKey) -> bool:
        path = self.folder.path(key)
        try:
            return self._writable().remove(path)
        except OSError as error:
            raise self._failure(error, "delete", str(path)) from error
        finally:
            self._forget(key, path)

    def _forget(self, key: ObjectKey, path: Path) -> None:
        self._index.forget(str(path))
        self._listing.forget(key.chunk)

    def _writable(self) -> Space:
        if self._space is None:
            raise OSError(self._refusal, os.strerror(self._refusal))
        return self._space

    @staticmethod
    def _failure(
        error: OSError, operation: str, context: str, *, is_temporary: bool = False
    ) -> BackendError:
        reason = error.strerror or str(error)
        return BackendError(reason, operation=operation, context=context, is_temporary=is_temporary)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the nvme tier at {self.folder.root} is closed")

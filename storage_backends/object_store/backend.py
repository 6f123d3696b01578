"""The object store backend: the contract over obstore.

Reads, lookups and deletes are requests of the event loop: cancelling one ends it and frees its
slot. Writes run on threads to their end, so that a cancelled one leaves no parts in the bucket.
An object appears when its upload is complete: a reader sees a whole old one, a whole new one, or
none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from cacheflow.abc import StorageBackend
from cacheflow.storage_backends.checks import check_reads, check_writes
from cacheflow.storage_backends.flights import Flights
from cacheflow.storage_backends.object_store.copying import copy_into, lend
from cacheflow.storage_backends.object_store.headers import Headers, Listed
from cacheflow.storage_backends.object_store.names import folder_of, key_of, path_of
from cacheflow.storage_backends.object_store.opening import check, make_store
from cacheflow.storage_backends.object_store.problems import STORE_ERRORS, is_full, problem
from cacheflow.storage_backends.object_store.settings import ObjectStoreOptions
from cacheflow.storage_backends.storing import store_on_threads
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.types import Capabilities, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from obstore.store import ObjectStore

    from cacheflow.errors import BackendError
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, Write

__all__ = ["ObjectStoreBackend"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 1.0
_COPY_THREADS: Final = 2
_PAGE_OBJECTS: Final = 1000
"""Objects in one page of a listing; S3 gives no more."""
_SCAN_BATCH: Final = 128
"""Headers that a scan waits for at a time: it goes on in small steps."""
_PARTS_AT_ONCE: Final = 4


class ObjectStoreBackend(StorageBackend):
    """Use :meth:`open`; one instance may be used by one event loop, a bucket by many hosts."""

    name: ClassVar[str] = "object-store"

    def __init__(self, options: ObjectStoreOptions, store: ObjectStore) -> None:
        self.options = options
        self.where = options.url.rstrip("/")
        lasting = options.scheme != "memory"
        self.capabilities = Capabilities(
            persistent=lasting,
            shared=lasting,
            suggested_depth=min(16, options.concurrency),
            suggested_read_bytes=8 << 20,
        )
        self._store = store
        self._flights = Flights(options.concurrency, f"the object store tier at {self.where}")
        self._copies = IoThreads(_COPY_THREADS, "cacheflow-objects-copy")
        self._writers = IoThreads(options.writers, "cacheflow-objects-write")
        self._headers = Headers(store, self.where)
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """See :class:`ObjectStoreOptions`. Looks into the bucket once and writes nothing.

        Raises:
            BackendError: the server cannot be reached, or is in trouble.
        """
        parsed = ObjectStoreOptions.parse(cls.name, options)
        store = await asyncio.to_thread(make_store, parsed)
        await check(store, parsed)
        return cls(parsed, store)

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """Two rounds of concurrent requests at most: a listing for each chunk, then the headers
        that are new or have changed."""
        self._flights.check_open()
        chunks = list(dict.fromkeys(keys))
        try:
            listed = await self._flights.all([partial(self._list, chunk) for chunk in chunks])
            infos = await self._valid([entry for entries in listed for entry in entries])
        except STORE_ERRORS as error:
            raise problem(error, "lookup", self.where) from None
        found: dict[ChunkKey, list[ChunkInfo]] = {chunk: [] for chunk in chunks}
        for info in infos:
            found[info.key.chunk].append(info)
        return [found[key] for key in keys]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._flights.check_open()
        check_reads(reads)
        for read in reads:
            read.buffer.hold.acquire()
        start = time.monotonic()
        works = [(partial(self._read, read, start), read.buffer.hold.release) for read in reads]
        with self._flights.begin(works) as batch:
            for _ in works:
                yield await batch.next()

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._flights.check_open()
        check_writes(writes)
        return await store_on_threads(self._writers, writes, self._put)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Two requests an object: deleting alone does not tell whether there was one."""
        self._flights.check_open()
        unique = list(dict.fromkeys(keys))
        try:
            removed = await self._flights.all([partial(self._remove, key) for key in unique])
        except STORE_ERRORS as error:
            raise problem(error, "delete", self.where) from None
        left = {key for key, was_there in zip(unique, removed, strict=True) if was_there}
        answers = []
        for key in keys:  # of a repeated key the first one removed it
            answers.append(key in left)
            left.discard(key)
        return answers

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._flights.check_open()
        async with aclosing(self._pages("scan")) as pages:
            async for page in pages:
                for at in range(0, len(page), _SCAN_BATCH):
                    try:
                        infos = await self._valid(page[at : at + _SCAN_BATCH])
                    except STORE_ERRORS as error:
                        raise problem(error, "scan", self.where) from None
                    for info in infos:
                        yield info

    async def used_bytes(self) -> int:
        """Bytes of all objects, those that turned out invalid included. Lists all of them: one
        request for a thousand."""
        self._flights.check_open()
        total = 0
        async with aclosing(self._pages("used_bytes")) as pages:
            async for page in pages:
                total += sum(entry.nbytes for entry in page)
        return total

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            _, *ended = await asyncio.gather(
                self._flights.aclose(),
                self._copies.aclose(_CLOSE_SECONDS),
                self._writers.aclose(_CLOSE_SECONDS),
            )
            if not all(ended):
                _log.error("%s: closed with writes still under way", self.where)

    # -- requests ------------------------------------------------------------------------------

    async def _list(self, chunk: ChunkKey) -> list[Listed]:
        entries: list[Listed] = []
        async for page in self._store.list(folder_of(chunk), chunk_size=_PAGE_OBJECTS):
            entries += _ours(page)
        return entries

    async def _pages(self, operation: str) -> AsyncGenerator[list[Listed], None]:
        stream = self._store.list(chunk_size=_PAGE_OBJECTS)
        while True:
            try:
                [page] = await self._flights.all([partial(anext, stream, None)])
            except STORE_ERRORS as error:
                raise problem(error, operation, self.where) from None
            if page is None:
                return
            yield _ours(page)

    async def _valid(self, listed: Sequence[Listed]) -> list[ChunkInfo]:
        """The infos of the objects that are what their names and headers say."""
        new = [entry for entry in listed if not self._headers.knows(entry)]
        known = [self._headers.info(entry) for entry in listed if self._headers.knows(entry)]
        read = await self._flights.all([partial(self._headers.read, entry) for entry in new])
        return [info for info in (*known, *read) if info is not None]

    async def _read(self, read: Read, start: float) -> TransferResult:
        status, count, error = TransferStatus.OK, 0, None
        wanted = read.buffer.nbytes
        path = path_of(read.key)
        try:
            data = await self._store.get_range_async(path, start=read.offset, length=wanted)
            count = len(data)
            await self._copy(read, data)
            status = TransferStatus.OK if count == wanted else TransferStatus.SHORT
        except FileNotFoundError:
            status = TransferStatus.MISSING
        except STORE_ERRORS as caught:
            status, error = await self._why(read, caught)
        return TransferResult(read, status, count, time.monotonic() - start, error)

    async def _why(
        self, read: Read, error: Exception
    ) -> tuple[TransferStatus, BackendError | None]:
        """Why a read failed: stores differ in what they say to a range behind the end."""
        try:
            found = await self._store.head_async(path_of(read.key))
        except FileNotFoundError:
            return TransferStatus.MISSING, None
        except STORE_ERRORS:
            found = None
        if found is not None and found["size"] <= read.offset:
            return TransferStatus.SHORT, None
        return TransferStatus.FAILED, problem(error, "load", repr(read.key))

    async def _copy(self, read: Read, data: object) -> None:
        """On a thread that has a share in the hold: it may go on after we are cancelled."""
        hold = read.buffer.hold
        hold.acquire()

        def work() -> None:
            try:
                copy_into(read.buffer, data)
            finally:
                hold.release()

        job = self._copies.start(work, hold.release)
        try:
            await asyncio.shield(job.done)
        except BaseException:
            self._copies.withdraw(job)
            raise

    async def _remove(self, key: ObjectKey) -> bool:
        path = path_of(key)
        try:
            await self._store.head_async(path)
            await self._store.delete_async(path)
        except FileNotFoundError:
            return False
        return True

    # -- on threads ----------------------------------------------------------------------------

    def _put(self, write: Write) -> tuple[TransferStatus, BackendError | None]:
        try:
            self._write(write)
        except STORE_ERRORS as error:
            status = TransferStatus.FULL if is_full(error) else TransferStatus.FAILED
            return status, problem(error, "store", self.where)
        return TransferStatus.OK, None

    def _write(self, write: Write) -> None:
        part_bytes = self.options.part_bytes
        self._store.put(
            path_of(write.info.key),
            [lend(part) for part in write.parts if part.nbytes],
            use_multipart=write.nbytes > part_bytes,
            chunk_size=part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )


def _ours(page: Sequence[Mapping[str, object]]) -> list[Listed]:
    entries = []
    for meta in page:
        path, tag, size = str(meta["path"]), meta["e_tag"], meta["size"]
        if (key := key_of(path)) is not None:
            assert isinstance(size, int)
            entries.append(Listed(key, path, size, None if tag is None else str(tag).strip('"')))
    return entries

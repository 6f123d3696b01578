"""The valkey backend: whole objects as string values, read in ranges by GETRANGE.

Each object is one value, so that SET makes it visible all at once, and each chunk has a set with
the names of its objects, so that a lookup needs no search. Both keys of a chunk share a hash tag:
on a cluster they live in one slot, and one transaction changes both.

The caller's memory is touched between two awaits only, by this code and nothing else. That makes
the contract's holds simple: a hold is released when the task that has it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, CapacityError, ClosedError, ConfigError, IntegrityError
from cacheflow.kv import decode_header, format_name, header_size, parse_name
from cacheflow.types import Capabilities, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Iterable,
        Mapping,
        Sequence,
    )

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, Write

__all__ = ["ValkeyBackend", "ValkeyOptions"]

_FRONT_BYTES: Final = 8192
"""What a lookup reads of each object: most headers are no longer."""
_BATCH: Final = 256
"""Objects asked for in one round trip of a scan."""


class ValkeyOptions(BaseModel):
    """Options of the ``valkey`` backend. The password comes from ``VALKEY_PASSWORD``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = "redis://127.0.0.1:6379/0"
    prefix: str = Field(default="cacheflow", pattern=r"^[A-Za-z0-9_.-]+$")
    """Begins all keys; stores with different prefixes do not see each other."""
    connections: int = Field(default=8, ge=1, le=256)
    """Requests in flight at once."""
    timeout: float = Field(default=5.0, gt=0, le=600)
    """Seconds without an answer after which a request has failed."""


class ValkeyBackend(StorageBackend):
    """Use :meth:`open`."""

    name: ClassVar[str] = "valkey"

    def __init__(self, options: ValkeyOptions, client: Redis) -> None:
        self.capabilities = Capabilities(
            persistent=True,  # the objects survive this process, if not the server's
            shared=True,
            suggested_depth=options.connections,
            suggested_read_bytes=1 << 20,
        )
        self._client = client
        self._prefix = options.prefix
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        try:
            parsed = ValkeyOptions.model_validate(dict(options))
            pool = BlockingConnectionPool.from_url(
                parsed.url,
                password=os.environ.get("VALKEY_PASSWORD"),
                max_connections=parsed.connections,
                timeout=None,  # wait for a free connection as long as it takes ...
                socket_timeout=parsed.timeout,  # ... since no request keeps one for longer
                socket_connect_timeout=parsed.timeout,
            )
        except (ValidationError, ValueError) as error:
            raise ConfigError(f"storage backend 'valkey': {error}") from None
        backend = cls(parsed, Redis(connection_pool=pool))
        try:
            await backend._ask("open", backend._client.ping())
        except BaseException as error:
            await backend.aclose()
            if isinstance(error.__cause__, AuthenticationError):
                raise ConfigError("storage backend 'valkey': set VALKEY_PASSWORD") from None
            raise
        return backend

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """Two round trips, whatever the number of keys."""
        self._check()
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.smembers(self._chunk(key.digest.hex()))
        answers = await self._ask("lookup", pipe.execute())
        names = [[name.decode() for name in found] for found in answers]
        infos = iter(await self._infos("lookup", [name for found in names for name in found]))
        return [[info for _ in found if (info := next(infos)) is not None] for found in names]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._check()
        if any(read.offset < 0 or read.buffer.view is None for read in reads):
            raise ValueError(f"one of these is no range of host memory: {reads!r:.200}")
        for read in reads:  # before the first await
            read.buffer.hold.acquire()
        tasks = [asyncio.create_task(self._read(read)) for read in reads]
        for task, read in zip(tasks, reads, strict=True):
            task.add_done_callback(lambda _, hold=read.buffer.hold: hold.release())  # type: ignore[misc]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:  # the caller has left, or closing or a bug has ended a read
            await _end(tasks)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        for write in writes:
            if write.nbytes != write.info.nbytes or any(p.view is None for p in write.parts):
                raise ValueError(f"{write.nbytes} bytes of host memory are not {write.info.key!r}")
        tasks = []
        for write in writes:
            task = asyncio.create_task(self._write(write))
            for part in write.parts:
                part.hold.acquire()
                task.add_done_callback(lambda _, hold=part.hold: hold.release())  # type: ignore[misc]
            tasks.append(task)
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _end(tasks)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        # No transaction: a server that is full refuses whatever comes in one, deletes included.
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.delete(self._object(format_name(key)))
            pipe.srem(self._chunk(key.chunk.digest.hex()), format_name(key))
        answers = await self._ask("delete", pipe.execute())
        return [count == 1 for count in answers[::2]]

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        async for names in self._names():
            for info in await self._infos("scan", names):
                if info is not None:
                    yield info

    async def used_bytes(self) -> int:
        total = 0
        async for names in self._names():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(self._object(name))
            total += sum(await self._ask("used_bytes", pipe.execute()))
        return total

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await _end(self._under_way)
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def _read(self, read: Read) -> TransferResult:
        start = time.monotonic()
        status, count, failure = TransferStatus.OK, 0, None
        assert read.buffer.view is not None
        try:
            exists, data = await self._fetch(read)
            count = len(data)
            # On the loop, like redis-py's own work on the reply: 0.1 ms a MiB.
            read.buffer.view[:count] = data
            if not exists:
                status = TransferStatus.MISSING
            elif count < read.buffer.nbytes:
                status = TransferStatus.SHORT
        except BackendError as error:
            status, failure = TransferStatus.FAILED, error
        return TransferResult(read, status, count, time.monotonic() - start, failure)

    async def _fetch(self, read: Read) -> tuple[int, bytes]:
        name, last = self._object(format_name(read.key)), read.offset + read.buffer.nbytes - 1
        pipe = self._client.pipeline(transaction=False)
        pipe.exists(name)  # GETRANGE answers "nothing there" and "nothing that far" alike
        pipe.getrange(name, read.offset, last)
        exists, data = await self._ask("load", pipe.execute())
        return exists, data

    async def _write(self, write: Write) -> TransferResult:
        start = time.monotonic()
        try:
            await self._put(write)
        except BackendError as error:
            full = isinstance(error.__cause__, OutOfMemoryError)
            status = TransferStatus.FULL if full else TransferStatus.FAILED
            failure = CapacityError("valkey is at its maxmemory") if full else error
            return TransferResult(write, status, 0, time.monotonic() - start, failure)
        return TransferResult(write, TransferStatus.OK, write.nbytes, time.monotonic() - start)

    async def _put(self, write: Write) -> None:
        name = format_name(write.info.key)
        pipe = self._client.pipeline(transaction=True)
        pipe.set(self._object(name), b"".join(part.view or b"" for part in write.parts))
        pipe.sadd(self._chunk(write.info.key.chunk.digest.hex()), name)
        await self._ask("store", pipe.execute())

    async def _infos(self, operation: str, names: Sequence[str]) -> list[ChunkInfo | None]:
        """What the objects say of themselves; None for those that are gone or not valid."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.getrange(self._object(name), 0, _FRONT_BYTES - 1)
            pipe.strlen(self._object(name))
        answers = await self._ask(operation, pipe.execute())
        pairs = zip(names, answers[::2], answers[1::2], strict=True)
        return [await self._info(operation, *pair) for pair in pairs]

    async def _info(self, operation: str, name: str, front: bytes, nbytes: int) -> ChunkInfo | None:
        try:
            key, size = parse_name(name), header_size(front)
            if size > len(front):
                work = self._client.getrange(self._object(name), 0, size - 1)
                front = await self._ask(operation, work)
            info = decode_header(front, expect=key)
        except (ValueError, IntegrityError):
            return None
        return info if info.nbytes == nbytes else None

    async def _names(self) -> AsyncIterator[list[str]]:
        """The names of all objects, in batches; SCAN may give a key twice."""
        self._check()
        seen: set[str] = set()
        cursor, pattern = 0, f"{self._prefix}:{{*}}:*"
        while True:
            work = self._client.scan(cursor, match=pattern, count=_BATCH)
            cursor, keys = await self._ask("scan", work)
            names = {key.decode().rpartition(":")[2] for key in keys} - seen
            seen |= names
            yield sorted(names)
            if cursor == 0:
                return

    async def _ask(self, operation: str, work: Awaitable[Any]) -> Any:
        """Await an answer, unless closing is quicker. redis-py drops the connection of a request
        that is cancelled, so that its answer reaches nobody else."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self._closed:
            task.cancel()
        try:
            await asyncio.wait([task])  # raises only if it is us who are cancelled
        finally:
            await _end([task])
        if task.cancelled():
            raise ClosedError("the valkey tier was closed")
        try:
            return task.result()
        except RedisError as error:
            # Timeouts, lost connections, a server that is loading: all of them may pass.
            raise BackendError(str(error), operation=operation, is_temporary=True) from error

    def _chunk(self, digest: str) -> str:
        return f"{self._prefix}:{{{digest}}}"

    def _object(self, name: str) -> str:
        return f"{self._chunk(name[:64])}:{name}"

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the valkey tier is closed")


async def _end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait for it; nothing of ours outlives the call that began it."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

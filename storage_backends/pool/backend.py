"""The pool backend: the storage contract over one or several store processes.

Directory operations go over each store's side channel, bytes over a transport. A store that is down
is a miss for its keys. Moves bytes and verifies nothing but that what it read is what was leased.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self, cast

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, ClosedError, ConfigError, IntegrityError
from cacheflow.kv import decode_header, format_name
from cacheflow.pool import messages
from cacheflow.registry import load_transport
from cacheflow.storage_backends.checks import check_reads, check_writes
from cacheflow.storage_backends.flights import Flights
from cacheflow.storage_backends.pool.discovery import discovery
from cacheflow.storage_backends.pool.guard import Guard
from cacheflow.storage_backends.pool.looking import Looking
from cacheflow.storage_backends.pool.members import Members
from cacheflow.storage_backends.pool.peer import Peer
from cacheflow.storage_backends.pool.reading import Loading
from cacheflow.storage_backends.pool.repair import Repair
from cacheflow.storage_backends.pool.settings import PoolOptions, read_token, tls_context
from cacheflow.storage_backends.pool.writing import Storing
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.types import Capabilities, StorePart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from ssl import SSLContext

    from cacheflow.pool import Transport, TransportKind
    from cacheflow.storage_backends.pool.discovery import Discovery
    from cacheflow.storage_backends.pool.settings import Address
    from cacheflow.types import (
        Buffer,
        ChunkInfo,
        ChunkKey,
        ObjectKey,
        Read,
        TransferResult,
        Write,
    )

__all__ = ["PoolBackend"]

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 1024
"""Reads, writes and questions under way."""
_CHECKSUM_THREADS: Final = 2
_CLOSE_SECONDS: Final = 1.0


class PoolBackend(StorageBackend):
    """Use :meth:`open`; one instance may be used by one event loop, a pool by many hosts."""

    name: ClassVar[str] = "pool"

    def __init__(
        self,
        options: PoolOptions,
        stores: Discovery,
        transports: Mapping[str, Transport],
        token: bytes,
        tls: SSLContext | None,
    ) -> None:
        self.options = options
        self.capabilities = Capabilities(
            persistent=True, shared=True, evicts=True, suggested_depth=8
        )
        self.transports = transports
        self._takes_device_memory = any(way.takes_device_memory for way in transports.values())
        client = f"{secrets.token_hex(8)}"

        def make(name: str, address: Address) -> Peer:
            return Peer(name, address, f"{client}-{name}"[:128], token, transports, tls, options)

        self.members = Members(stores, options, make)
        self._flights = Flights(_AT_ONCE, "the pool tier")
        self._threads = IoThreads(_CHECKSUM_THREADS, "cacheflow-pool-sum")
        self.looking = Looking(self.members, self._flights, self._lacks)
        self.repair = Repair(self.looking, self._threads, options.transfer_seconds)
        self._distrusted: set[ObjectKey] = set()
        self._removing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """See :class:`PoolOptions`. Stores that cannot be reached now are tried on.

        Raises:
            ConfigError: the stores refuse this client, or no transport works here.
        """
        parsed = PoolOptions.parse(cls.name, options)
        token = await asyncio.to_thread(read_token, parsed)
        tls = await asyncio.to_thread(tls_context, parsed)
        async with AsyncExitStack() as stack:
            transports = await _open_transports(parsed.transports, tls, stack)
            backend = cls(parsed, await discovery(parsed), transports, token, tls)
            stack.pop_all()  # they are the backend's now
            stack.push_async_callback(backend.aclose)
            await backend.members.open()
            stack.pop_all()
        return backend

    def parts(self) -> Sequence[StorePart]:
        """Each store, whether it is up and why not, and its transport."""
        return [
            StorePart(
                peer.name,
                peer.is_up,
                peer.hello.transport if peer.hello else "",
                repaired=self.repair.copied[peer.name],
                not_repaired=self.repair.dropped[peer.name],
                reason=peer.reason,
            )
            for peer in list(self.members.peers.values())  # scraped from another thread
        ]

    # -- reading -------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """What is in stores that do not answer is not found: no error."""
        self._flights.check_open()
        return await self.looking.lookup(keys)

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        """Into device memory, too, if it was registered: straight from stores that are reached over
        a transport that can, and MISSING from others."""
        self._flights.check_open()
        check_reads(reads, device=self._takes_device_memory)
        guards = [Guard((read.buffer,)) for read in reads]  # before the first await
        try:
            loading = Loading(reads, guards, self.looking.route, self.options.transfer_seconds)
            works = [(partial(loading.read, at), guard.leave) for at, guard in enumerate(guards)]
            try:
                with self._flights.begin(works) as batch:
                    for _ in works:
                        yield await batch.next()
            finally:
                await loading.aclose()
        finally:
            for guard in guards:
                guard.leave()

    # -- writing -------------------------------------------------------------------------------

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """To all stores of each key that are up; one that takes it is enough."""
        self._flights.check_open()
        check_writes(writes)
        with ExitStack() as held:
            guards = []
            for write in writes:
                guards.append(Guard(write.parts))
                held.callback(guards[-1].leave)
            seconds = self.options.transfer_seconds
            storing = Storing(writes, guards, self._homes, self._threads, seconds)
            works = [(partial(storing.write, at), guards[at].leave) for at in range(len(writes))]
            try:
                with self._flights.begin(works) as batch:
                    results = [await batch.next() for _ in works]
                ended = {id(result.request): result for result in results}
            finally:
                await storing.aclose()
            for write in writes:
                self._changed(write.info.key)
        return [ended[id(write)] for write in writes]

    def _homes(self, key: ObjectKey) -> list[Peer]:
        return self.members.of(key.chunk.digest)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """From every store: those that have left or joined may have old copies.

        Raises:
            BackendError: a store could not be reached: what the others had is deleted.
        """
        self._flights.check_open()
        works = [partial(self._delete_at, peer, keys) for peer in self.members.up]
        for key in keys:
            self._changed(key)
        answers = await self._flights.all(works)
        self._check_reachable("delete")
        return [any(deleted) for deleted in zip(*answers, strict=True)]

    def _changed(self, key: ObjectKey) -> None:
        self.looking.changed(key)
        self.repair.forget(key)

    def _lacks(self, peer: Peer, info: ChunkInfo, others: Sequence[Peer]) -> None:
        self.repair.lacks(peer, info, others)

    async def _delete_at(self, peer: Peer, keys: Sequence[ObjectKey]) -> list[bool]:
        deleted: list[bool] = []
        for at in range(0, len(keys), messages.BATCH):
            names = tuple(format_name(key) for key in keys[at : at + messages.BATCH])
            request = messages.Delete(names=names)
            answer = await peer.ask(request, messages.DeleteReply, is_work=True)
            deleted += answer.deleted
        return deleted

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        """Damaged objects are deleted, to be stored anew."""
        self._distrusted.update(keys)
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove())

    async def _remove(self) -> None:
        while self._distrusted:
            keys, self._distrusted = list(self._distrusted), set()
            _log.warning("pool: %d damaged objects are deleted", len(keys))
            try:
                await self.delete(keys)
            except (BackendError, ClosedError) as error:
                _log.warning("pool: they are not: %s", error)

    # -- the rest ------------------------------------------------------------------------------

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        """Raises BackendError at the end if a store could not be asked."""
        self._flights.check_open()
        seen: set[ObjectKey] = set()
        for peer in self.members.up:
            after = -1
            while after:
                [page] = await self._flights.all([partial(self._page, peer, max(after, 0))])
                after, infos = page
                for info in infos:
                    if info.key not in seen:
                        seen.add(info.key)
                        yield info
        self._check_reachable("scan")

    async def _page(self, peer: Peer, after: int) -> tuple[int, list[ChunkInfo]]:
        request = messages.Scan(after=after)
        answer = await peer.ask(request, messages.ScanReply, is_work=True)
        return answer.after, await asyncio.to_thread(_valid, answer.headers)

    async def used_bytes(self) -> int:
        """Of all copies in all stores.

        Raises:
            BackendError: a store is not reachable.
        """
        self._flights.check_open()
        self._check_reachable("used_bytes")
        works = [partial(peer.ask, messages.Stat(), messages.StatReply) for peer in self.members.up]
        return sum(answer.used_bytes for answer in await self._flights.all(works))

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        loans = [transport.register_memory(memory) for transport in self.transports.values()]

        def end() -> None:
            for loan in loans:
                loan()

        return end

    async def aclose(self) -> None:
        removing, self._removing = self._removing, None
        if removing is not None:
            removing.cancel()
            await asyncio.wait([removing])
        await self.repair.aclose()
        await self._flights.aclose()
        await self.members.aclose()
        for transport in self.transports.values():
            await transport.aclose()
        await self._threads.aclose(_CLOSE_SECONDS)

    def _check_reachable(self, operation: str) -> None:
        """Raises BackendError if not every store is up."""
        missing = self.members.missing
        if self.members.up and not missing:
            return
        what = ", ".join(missing) or "none is known"
        raise BackendError(
            f"stores that cannot be reached: {what}",
            operation=operation,
            context=self.name,
            is_temporary=True,
        )


async def _open_transports(
    names: Sequence[str], tls: SSLContext | None, stack: AsyncExitStack
) -> dict[str, Transport]:
    """Those that work here; ``stack`` closes them."""
    if not names:
        raise ConfigError("storage backend 'pool', option 'transports': it is empty; name one")
    transports: dict[str, Transport] = {}
    problems = []
    for name in names:
        try:
            kind = cast("TransportKind", await asyncio.to_thread(load_transport, name))
            transports[name] = await kind.open_transport(tls)
            stack.push_async_callback(transports[name].aclose)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
            _log.info("pool: transport %s is left out: %s", name, error)
    if not transports:
        raise ConfigError(
            f"storage backend 'pool', option 'transports': none works here ({'; '.join(problems)})"
        )
    return transports


def _valid(headers: Sequence[bytes]) -> list[ChunkInfo]:
    infos = []
    for header in headers:
        try:
            infos.append(decode_header(header))
        except IntegrityError as error:
            _log.warning("an object is ignored: %s", error)
    return infos

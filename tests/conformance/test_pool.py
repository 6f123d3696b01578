"""The pool backend fulfils the storage contract on a store in another process, over tcp."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest

from cacheflow.kv import format_name
from cacheflow.pool import messages
from cacheflow.storage_backends.pool import PoolBackend, tcp
from cacheflow.storage_backends.pool.channel import Channel
from cacheflow.testing.conformance import Pause, StorageBackendTests
from cacheflow.testing.store_process import StoreProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey

ARENA = (16 << 20) + (7 << 12)
"""Bytes: a size that no other mapping of the process has."""
SMALL = 100 << 10


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, StoreProcess]]:
    """A store for all tests, and a small one; both are emptied for each new folder."""
    log = tmp_path_factory.mktemp("stores") / "log"
    with StoreProcess(log, arena=ARENA) as store, StoreProcess(log, arena=SMALL) as small:
        yield {ARENA: store, SMALL: small}


class TestPool(StorageBackendTests):
    """The real protocol and real processes; the back door is the store's memory."""

    transport: ClassVar[str] = "tcp"

    @pytest.fixture(autouse=True)
    def _on(self, stores: dict[int, StoreProcess]) -> None:
        self.stores = stores
        self.where: dict[int, Path] = {}

    async def open_backend(self, where: Path) -> StorageBackend:
        return await self._open(where, ARENA)

    async def open_small(self, where: Path) -> StorageBackend:
        return await self._open(where, SMALL)

    async def _open(self, where: Path, arena: int) -> StorageBackend:
        options: dict[str, object] = {
            "peers": [self.stores[arena].address],
            "transports": [self.transport],
            "request_seconds": 10,
            "connect_seconds": 10,
            "transfer_seconds": 20,
        }
        backend = await PoolBackend.open(options)
        if self.where.get(arena) != where:
            self.where[arena] = where
            await backend.delete([info.key async for info in backend.scan()])
        return backend

    async def leftovers(self, backend: StorageBackend) -> list[str]:
        """Slots that wait to be committed; a slot is given back by a message, so: soon none."""
        for _ in range(500):
            async with self._channel() as channel:
                stat = await channel.ask(messages.Stat(), messages.StatReply, 5.0)
            if not stat.uncommitted:
                return []
            await asyncio.sleep(0.01)
        return [f"{stat.uncommitted} slots"]

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        async with self._slot(key) as slot:
            return None if slot is None else os.pread(slot[0], slot[2], slot[1])

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        async with self._slot(stored.key) as slot:
            if slot is None or len(data) != slot[2]:
                return False
            return os.pwrite(slot[0], data, slot[1]) == len(data)

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        pause = Pause()
        with (
            mock.patch.object(tcp, "receive", _after(pause, tcp.receive)),
            mock.patch.object(tcp, "send", _after(pause, tcp.send)),
        ):
            try:
                yield pause
            finally:
                pause.go.set()

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        store = self.stores[ARENA]
        channel = await Channel.connect("test", ("127.0.0.1", store.port), None)
        hello = messages.Hello(client="back door", token=b"", offers=((self.transport, b""),))
        try:
            await channel.ask(hello, messages.HelloReply, 5.0)
            yield channel
        finally:
            await channel.aclose()

    @asynccontextmanager
    async def _slot(self, key: ObjectKey) -> AsyncIterator[tuple[int, int, int] | None]:
        """A descriptor of the store's memory, and where in it the object lies, and its size."""
        request = messages.Lease(names=(format_name(key),))
        async with self._channel() as channel:
            answer = await channel.ask(request, messages.LeaseReply, 5.0)
            [slot] = answer.slots
            if slot is None:
                yield None
                return
            base = await asyncio.to_thread(_arena_of, self.stores[ARENA].pid)
            memory = os.open(f"/proc/{self.stores[ARENA].pid}/mem", os.O_RDWR)
            try:
                yield memory, base + slot[0], slot[1]
            finally:
                os.close(memory)


def _arena_of(pid: int) -> int:
    """Where the arena lies in the store's address space."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="ascii").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match and int(match[2], 16) - int(match[1], 16) == ARENA:
            found.append(int(match[1], 16))
    [base] = found
    return base


def _after(pause: Pause, call: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*args: Any) -> Any:
        pause.wait()
        return call(*args)

    return waiting

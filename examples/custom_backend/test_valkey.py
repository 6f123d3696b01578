"""The valkey backend fulfils CacheFlow's storage contract, on a real server."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from cacheflow_valkey import ValkeyBackend
from redis import ConnectionError as NotReachable
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from cacheflow.errors import BackendError
from cacheflow.kv import format_name
from cacheflow.registry import load_backend
from cacheflow.testing.conformance import Pause, StorageBackendTests
from cacheflow.testing.freezing import freeze, thaw
from cacheflow.testing.objects import load_one, make_object

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterator
    from pathlib import Path
    from typing import Any

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")

pytestmark = pytest.mark.skipif(SERVER is None, reason="no valkey-server or redis-server here")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A server of our own on a free port, that keeps nothing on the disk."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    folder = tmp_path_factory.mktemp("valkey")
    assert SERVER is not None
    process = subprocess.Popen([SERVER, *options], cwd=folder, stdout=subprocess.DEVNULL)
    patience = Retry(ConstantBackoff(0.05), 100, supported_errors=(NotReachable,))
    client = Redis(port=port, retry=patience)
    client.ping()
    yield client
    client.close()
    process.terminate()
    process.wait()


class TestValkey(StorageBackendTests):
    """Every rule of the contract."""

    client: Redis

    @pytest.fixture(autouse=True)
    def _on(self, server: Redis) -> None:
        self.client = server
        server.config_set("maxmemory", 0)

    async def open_backend(self, where: Path) -> StorageBackend:
        return await self._open(where, connections=8)

    async def open_small(self, where: Path) -> StorageBackend:
        # The server counts what its connections buffer: with a single one that has been in use it
        # comes out the same every time.
        backend = await self._open(where, connections=1)
        for number in range(100, 104):
            await backend.store([make_object(number).write()])
            await self.bytes_of(backend, make_object(number))
            await backend.lookup([make_object(number).key.chunk])
            await backend.delete([make_object(number).key])
        room = self.client.info("memory")["used_memory"] + 8 * (40 << 10)
        self.client.config_set("maxmemory", room)
        return backend

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        data = self.client.get(_name(backend, key))
        assert not isinstance(data, str)
        return data

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        return bool(self.client.set(_name(backend, stored.key), data))

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        assert isinstance(backend, ValkeyBackend)
        pause, threads = Pause(abortable=True), ThreadPoolExecutor(64)

        ask = backend._ask

        async def held(work: Coroutine[Any, Any, Any]) -> Any:
            try:
                await asyncio.get_running_loop().run_in_executor(threads, pause.wait)
                return await work
            finally:
                work.close()

        def waiting(operation: str, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
            return ask(operation, held(work) if operation in ("load", "store") else work)

        with mock.patch.object(backend, "_ask", waiting):
            try:
                yield pause
            finally:
                pause.go.set()
                threads.shutdown()

    async def test_a_server_that_does_not_answer(self, tmp_path: Path) -> None:
        """Reads and lookups of a server that hangs fail in bounded time, and may be tried again."""
        stored = make_object(1)
        backend = await self._open(tmp_path, connections=2, timeout=0.1)
        await backend.store([stored.write()])
        process = self.client.info("server")["process_id"]
        await asyncio.to_thread(freeze, process)
        try:
            result, _ = await load_one(backend, stored.key, 0, 4096)
            assert isinstance(result.error, BackendError)
            assert result.error.is_temporary
            with pytest.raises(BackendError, match="imeout"):
                await backend.lookup([stored.key.chunk])
        finally:
            thaw(process)
        assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
        await backend.aclose()

    async def _open(self, where: Path, connections: int, timeout: float = 30) -> StorageBackend:
        port = self.client.connection_pool.connection_kwargs["port"]
        prefix = hashlib.sha256(str(where).encode()).hexdigest()[:16]
        options = {"url": f"redis://127.0.0.1:{port}/0", "prefix": prefix, "timeout": timeout}
        return await load_backend("valkey").open({**options, "connections": connections})


def _name(backend: StorageBackend, key: ObjectKey) -> str:
    assert isinstance(backend, ValkeyBackend)
    return backend._object(format_name(key))

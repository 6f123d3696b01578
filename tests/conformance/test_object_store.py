"""The object store backend fulfils the storage contract in memory, in a folder, and on a server
that speaks S3 (SeaweedFS: a real server, if not S3 itself)."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.storage_backends.object_store import ObjectStoreBackend, backend, names
from cacheflow.testing.conformance import Pause, StorageBackendTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from obstore.store import ObjectStore

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.testing.s3_server import S3Server
    from cacheflow.types import ObjectKey


class ObjectStoreHarness(StorageBackendTests):
    """Not collected itself."""

    def options(self, where: Path) -> dict[str, object]:
        raise NotImplementedError

    async def open_backend(self, where: Path) -> StorageBackend:
        return await ObjectStoreBackend.open(self.options(where))

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        store = _store(backend)
        try:
            return bytes(await (await store.get_async(names.path_of(key))).bytes_async())
        except FileNotFoundError:
            return None

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        await _store(backend).put_async(names.path_of(stored.key), data, use_multipart=False)
        return True

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        pause = Pause()
        with _held(pause, "copy_into"), _held(pause, "lend"):
            try:
                yield pause
            finally:
                pause.go.set()


@pytest.mark.both_loops
class TestInMemory(ObjectStoreHarness):
    """obstore's own memory."""

    def options(self, where: Path) -> dict[str, object]:
        return {"url": "memory:///"}


class TestInAFolder(ObjectStoreHarness):
    """obstore's local files."""

    def options(self, where: Path) -> dict[str, object]:
        return {"url": f"file://{where}/store"}

    async def leftovers(self, backend: StorageBackend) -> Sequence[str]:
        assert isinstance(backend, ObjectStoreBackend)
        root = backend.options.url.removeprefix("file://")
        files = await asyncio.to_thread(lambda: [n for *_, some in os.walk(root) for n in some])
        return [name for name in files if "#" in name]


class TestOnS3(ObjectStoreHarness):
    """A server started by the tests; every store has a prefix of its own in one bucket."""

    @pytest.fixture(autouse=True)
    def _on(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = s3_server
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)

    def options(self, where: Path) -> dict[str, object]:
        prefix = hashlib.sha256(str(where).encode()).hexdigest()[:16]
        return self.server.options(f"conformance/{prefix}")


def _store(backend: StorageBackend) -> ObjectStore:
    assert isinstance(backend, ObjectStoreBackend)
    return backend._store


@contextmanager
def _held(pause: Pause, name: str) -> Iterator[None]:
    """Hold up what touches the caller's memory: ``copy_into`` for reads, ``lend`` for writes."""
    call: Callable[..., Any] = getattr(backend, name)

    def waiting(*args: object) -> object:
        pause.wait()
        return call(*args)

    with mock.patch.object(backend, name, waiting):
        yield

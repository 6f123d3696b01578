"""A throttled backend is still a backend: the contract through a link, over dram."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar
from unittest import mock

from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from cacheflow.testing.conformance import Pause, StorageBackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey


class TestThrottled(StorageBackendTests):
    """Over a link that makes whoever uses it wait a little."""

    link: ClassVar[tuple[float, float]] = (1e9, 1e-4)
    """Bandwidth and latency."""

    async def open_backend(self, where: Path) -> StorageBackend:
        return await self._open(8 << 20)

    async def open_small(self, where: Path) -> StorageBackend:
        return await self._open(100 << 10)

    async def _open(self, capacity: int) -> StorageBackend:
        inner = await DramBackend.open({"capacity_bytes": capacity})
        return ThrottledBackend(inner, Link(*self.link), owns_inner=True)

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        found = _inner(backend)._find(key)
        return None if found is None else bytes(found.lease.view)

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        found = _inner(backend)._find(stored.key)
        if found is None or not data.startswith(stored.header) or len(data) != found.nbytes:
            return False
        found.lease.view[:] = data
        return True

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        pause, memmove = Pause(), ctypes.memmove

        def waiting(to: int, source: int, nbytes: int) -> None:
            pause.wait()
            memmove(to, source, nbytes)

        with mock.patch.object(ctypes, "memmove", waiting):
            try:
                yield pause
            finally:
                pause.go.set()


class TestUnlimited(TestThrottled):
    """Over a link that costs nothing."""

    link: ClassVar[tuple[float, float]] = (0.0, 0.0)


def _inner(backend: StorageBackend) -> DramBackend:
    assert isinstance(backend, ThrottledBackend)
    assert isinstance(backend.inner, DramBackend)
    return backend.inner

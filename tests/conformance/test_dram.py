"""The dram backend fulfils the storage contract."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.storage_backends.dram import DramBackend
from cacheflow.testing.conformance import Pause, StorageBackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey

pytestmark = pytest.mark.both_loops


class TestDram(StorageBackendTests):
    async def open_backend(self, where: Path) -> StorageBackend:
        return await DramBackend.open({"capacity_bytes": 8 << 20})

    async def open_small(self, where: Path) -> StorageBackend:
        return await DramBackend.open({"capacity_bytes": 100 << 10})

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        assert isinstance(backend, DramBackend)
        found = backend._find(key)
        return None if found is None else bytes(found.lease.view)

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        assert isinstance(backend, DramBackend)
        found = backend._find(stored.key)
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

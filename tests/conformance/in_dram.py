"""The back door of every backend whose objects lie in a dram backend, however deep inside."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from cacheflow.storage_backends.dram import DramBackend
from cacheflow.testing.conformance import Pause, StorageBackendTests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey

__all__ = ["InDram"]


class InDram(StorageBackendTests):
    """The contract's tests, but for opening. :meth:`dram` is where the objects really lie."""

    def dram(self, backend: StorageBackend) -> DramBackend:
        assert isinstance(backend, DramBackend)
        return backend

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        found = self.dram(backend)._find(key)
        return None if found is None else bytes(found.lease.view)

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        found = self.dram(backend)._find(stored.key)
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

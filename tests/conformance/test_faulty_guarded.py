"""A backend without faults, behind the fault injector or the guard, is still a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheflow.testing.faults import FaultyBackend
from cacheflow.tiers import Guarded, HealthLimits
from tests.conformance import test_dram as dram

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey


class TestFaulty(dram.TestDram):
    """Without faults."""

    def wrapped(self, backend: StorageBackend) -> StorageBackend:
        return FaultyBackend(backend)

    async def open_backend(self, where: Path) -> StorageBackend:
        return self.wrapped(await super().open_backend(where))

    async def open_small(self, where: Path) -> StorageBackend:
        return self.wrapped(await super().open_small(where))

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        return await super().raw_get(inner_of(backend), key)

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        return await super().raw_set(inner_of(backend), stored, data)

    def paused(self, backend: StorageBackend) -> Any:
        return super().paused(inner_of(backend))


class TestGuarded(TestFaulty):
    """A tier that is well. What was read over its end is a miss from then on, on purpose."""

    test_behaves_like_a_dictionary = None  # type: ignore[assignment]

    def wrapped(self, backend: StorageBackend) -> StorageBackend:
        return Guarded(backend, "memory", limits=HealthLimits(failures=1000))


def inner_of(backend: StorageBackend) -> StorageBackend:
    assert isinstance(backend, FaultyBackend | Guarded)
    return backend.inner

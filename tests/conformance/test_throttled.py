"""A throttled backend is still a backend: the contract through a link, over dram."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from tests.conformance.in_dram import InDram

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.abc import StorageBackend


class TestThrottled(InDram):
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

    def dram(self, backend: StorageBackend) -> DramBackend:
        assert isinstance(backend, ThrottledBackend)
        return super().dram(backend.inner)


class TestUnlimited(TestThrottled):
    """Over a link that costs nothing."""

    link: ClassVar[tuple[float, float]] = (0.0, 0.0)

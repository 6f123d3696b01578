"""A tier is still a backend: the contract through index, leases and capacity."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from cacheflow.kv import format_name
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.conformance import Pause, StorageBackendTests
from cacheflow.tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey


class TestTierOverDram(StorageBackendTests):
    """The capacity is the tier's: a batch never evicts itself, so a small tier is full too."""

    async def open_backend(self, where: Path) -> StorageBackend:
        inner = await DramBackend.open({"capacity_bytes": 16 << 20})
        return await Tier.over(inner, _settings(capacity_bytes=8 << 20))

    async def open_small(self, where: Path) -> StorageBackend:
        inner = await DramBackend.open({"capacity_bytes": 100 << 10})
        return await Tier.over(inner, _settings())

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        found = _dram(backend)._find(key)
        return None if found is None else bytes(found.lease.view)

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        found = _dram(backend)._find(stored.key)
        if found is None or not data.startswith(stored.header) or len(data) != found.nbytes:
            return False
        found.lease.view[:] = data
        return True


class TestTierOverNvme(StorageBackendTests):
    """Over a store that other processes share."""

    async def open_backend(self, where: Path) -> StorageBackend:
        options = {"path": str(where / "store"), "fsync": False}
        settings = _settings(capacity_bytes=8 << 20, ttl=3600)
        return await Tier.over(await NvmeBackend.open(options), settings)

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        try:
            return await asyncio.to_thread(_file(backend, key).read_bytes)
        except FileNotFoundError:
            return None

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        await asyncio.to_thread(_file(backend, stored.key).write_bytes, data)
        return True

    async def leftovers(self, backend: StorageBackend) -> Sequence[str]:
        return await asyncio.to_thread(os.listdir, _nvme(backend).folder.root / "tmp")

    @contextmanager
    def paused(self, backend: StorageBackend) -> Iterator[Pause]:
        pause = Pause()
        with (
            mock.patch.object(os, "preadv", _after(pause, os.preadv)),
            mock.patch.object(os, "pwritev", _after(pause, os.pwritev)),
        ):
            try:
                yield pause
            finally:
                pause.go.set()


def _settings(**fields: object) -> TierSettings:
    return TierSettings.model_validate({"name": "t", "backend": "any", **fields})


def _dram(backend: StorageBackend) -> DramBackend:
    assert isinstance(backend, Tier)
    assert isinstance(backend.inner, DramBackend)
    return backend.inner


def _nvme(backend: StorageBackend) -> NvmeBackend:
    assert isinstance(backend, Tier)
    assert isinstance(backend.inner, NvmeBackend)
    return backend.inner


def _file(backend: StorageBackend, key: ObjectKey) -> Path:
    name = format_name(key)
    return _nvme(backend).folder.root / "objects" / name[:2] / name


def _after(pause: Pause, call: Callable[..., int]) -> Callable[..., int]:
    def waiting(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        pause.wait()
        return call(descriptor, buffers, offset)

    return waiting

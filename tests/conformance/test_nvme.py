"""The nvme backend fulfils the storage contract, with O_DIRECT and without."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from unittest import mock

import pytest

from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.conformance import Pause, StorageBackendTests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import ObjectKey


class NvmeHarness(StorageBackendTests):
    """Not collected itself."""

    options: ClassVar[dict[str, object]] = {}

    async def open_backend(self, where: Path) -> StorageBackend:
        return await NvmeBackend.open({"path": str(where / "store"), **self.options})

    async def open_small(self, where: Path) -> StorageBackend:
        options = {"path": str(where / "small"), "max_bytes": 150_000, **self.options}
        return await NvmeBackend.open(options)

    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        try:
            return await asyncio.to_thread(_file(backend, key).read_bytes)
        except FileNotFoundError:
            return None

    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        await asyncio.to_thread(_file(backend, stored.key).write_bytes, data)
        return True

    async def leftovers(self, backend: StorageBackend) -> Sequence[str]:
        assert isinstance(backend, NvmeBackend)
        return await asyncio.to_thread(os.listdir, backend.folder.root / "tmp")

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


@pytest.mark.both_loops
class TestNvme(NvmeHarness):
    """With the options as they come."""


class TestNvmeWithoutDirect(NvmeHarness):
    """Everything through the page cache."""

    options: ClassVar[dict[str, object]] = {"direct": "off", "fsync": False}


class TestNvmeInMemory(NvmeHarness):
    """On tmpfs."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        folder = tempfile.mkdtemp(dir="/dev/shm", prefix="cacheflow-test-")
        yield Path(folder)
        shutil.rmtree(folder)


class TestNvmeOnAFileSystemWithoutDirect(NvmeHarness):
    """On a file system that refuses O_DIRECT when a file is opened, as many network ones do."""

    @pytest.fixture(autouse=True)
    def _refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refusing(path: str | Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                if flags & os.O_CREAT:  # Linux makes the file before it refuses the flag
                    os.close(real(path, flags & ~os.O_DIRECT, mode))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)


def _file(backend: StorageBackend, key: ObjectKey) -> Path:
    assert isinstance(backend, NvmeBackend)
    name = format_name(key)
    return backend.folder.root / "objects" / name[:2] / name


def _after(pause: Pause, call: Callable[..., int]) -> Callable[..., int]:
    def waiting(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        pause.wait()
        return call(descriptor, buffers, offset)

    return waiting

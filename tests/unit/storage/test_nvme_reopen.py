"""Opening a store again: what is found, what is left alone, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing
from typing import TYPE_CHECKING
from unittest import mock

from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend, opening
from cacheflow.storage_backends.nvme import backend as backend_module
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from cacheflow.testing.objects import StoredObject

MANY = 200
"""A few batches of headers."""


async def open_store(folder: Path) -> NvmeBackend:
    return await NvmeBackend.open({"path": str(folder), "fsync": False})


async def make_store(folder: Path, *objects: StoredObject) -> None:
    backend = await open_store(folder)
    await store_all(backend, *objects)
    await backend.aclose()


def file_of(folder: Path, stored: StoredObject) -> Path:
    name = format_name(stored.key)
    return folder / "objects" / name[:2] / name


async def test_the_index_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    """Every valid object is found again and nothing else; what is no object is left where it is,
    counted, and listed for operators with what its name says."""
    objects = [make_object(number) for number in range(MANY)]
    await make_store(tmp_path, *objects)
    garbage, cut, renamed, *good = objects
    file_of(tmp_path, garbage).write_bytes(os.urandom(9000))
    os.truncate(file_of(tmp_path, cut), 4096)
    file_of(tmp_path, renamed).rename(file_of(tmp_path, renamed).with_name("old copy"))
    (tmp_path / "objects" / "README").write_text("hands off")
    backend = await open_store(tmp_path)
    found = [info async for info in backend.scan()]
    assert {info.key: info for info in found} == {each.key: each.info for each in good}
    assert len(found) == len(good)
    assert await backend.lookup([each.key.chunk for each in (garbage, cut, renamed)]) == [[]] * 3
    files = await backend.files()
    assert await backend.used_bytes() == sum(file.nbytes for file in files)
    strays = {file.path.name: file.key for file in files if file.key not in {i.key for i in found}}
    assert strays == {
        format_name(garbage.key): garbage.key,
        format_name(cut.key): cut.key,
        "old copy": None,
        "README": None,
    }
    await backend.aclose()


async def test_progress_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counting and reading headers say in the log how far they are."""
    await make_store(tmp_path, *(make_object(number) for number in range(MANY)))
    for number in range(900):
        (tmp_path / "objects" / str(number)).touch()
    caplog.set_level(logging.INFO)
    with (
        mock.patch.object(backend_module, "_TELL_SECONDS", -1.0),
        mock.patch.object(opening, "_REPORT_SECONDS", -1.0),
    ):
        backend = await open_store(tmp_path)
        assert len([info async for info in backend.scan()]) == MANY
    await backend.aclose()
    assert f"{tmp_path}: counted 1024 files so far" in caplog.messages
    assert f"{tmp_path}: read {MANY} of {MANY} headers" in caplog.messages


async def test_leaving_a_scan_early(tmp_path: Path) -> None:
    """What was being read ahead is given up, and the store goes on working."""
    await make_store(tmp_path, *(make_object(number) for number in range(MANY)))
    backend = await open_store(tmp_path)
    for _ in range(5):
        async with aclosing(backend.scan()) as infos:
            await anext(infos)
    scan = asyncio.ensure_future(_first_of(backend))
    await asyncio.sleep(0)
    scan.cancel()
    await asyncio.wait([scan])
    assert len([info async for info in backend.scan()]) == MANY
    await backend.aclose()


async def _first_of(backend: NvmeBackend) -> object:
    async for info in backend.scan():
        return info
    return None

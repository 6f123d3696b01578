"""Export and import: objects as plain files, verified on the way out and on the way in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import StoredObject, load_one, make_object
from cacheflow.testing.storage_harness import store_all

if TYPE_CHECKING:
    from pathlib import Path


async def open_store(folder: Path) -> NvmeBackend:
    return await NvmeBackend.open({"path": str(folder)})


def file_of(folder: Path, stored: StoredObject) -> Path:
    name = format_name(stored.key)
    return folder / "objects" / name[:2] / name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_export_and_import(tmp_path: Path) -> None:
    """What is exported is imported elsewhere, the same to the byte; importing again keeps it."""
    objects = [make_object(number) for number in range(5)]
    source = await open_store(tmp_path / "source")
    await store_all(source, *objects)
    folder = tmp_path / "exported"
    assert await source.export_objects(folder) == 5
    assert await source.export_objects(tmp_path / "two", [o.key.chunk for o in objects[:2]]) == 2
    assert names_in(folder) == sorted(format_name(each.key) for each in objects)
    with pytest.raises(ConfigError, match="File exists"):
        await source.export_objects(folder)
    target = await open_store(tmp_path / "target")
    assert (await target.import_objects(folder)).stored == 5
    for each in objects:
        assert (await load_one(target, each.key, 0, len(each.data)))[1] == each.data
    again = await target.import_objects(folder)
    assert (again.stored, again.kept) == (0, 5)
    await source.aclose()
    await target.aclose()


async def test_import_verifies(tmp_path: Path) -> None:
    """Damaged, truncated and misnamed files are refused by name and reason; others are ignored."""
    objects = [make_object(number) for number in range(6)]
    damaged = bytearray(objects[1].data)
    damaged[-1] ^= 1
    contents = [objects[0].data, bytes(damaged), objects[2].data[:-1], objects[4].data, b"", b"x"]
    for stored, data in zip(objects, contents, strict=True):
        (tmp_path / format_name(stored.key)).write_bytes(data)
    (tmp_path / "README").touch()
    backend = await open_store(tmp_path / "store")
    report = await backend.import_objects(tmp_path)
    assert (report.stored, report.kept, report.ignored) == (1, 0, 2)  # README and the store
    assert {name for name, _ in report.refused} == {format_name(o.key) for o in objects[1:]}
    assert [info async for info in backend.scan()] == [objects[0].info]
    with pytest.raises(ConfigError, match="missing"):
        await backend.import_objects(tmp_path / "missing")
    await backend.aclose()


async def test_export_verifies(tmp_path: Path) -> None:
    """An object whose payload is damaged is not exported: IntegrityError, and no file of it."""
    stored = make_object(1)
    backend = await open_store(tmp_path / "store")
    await store_all(backend, stored)
    with file_of(tmp_path / "store", stored).open("r+b") as file:
        file.seek(8192)
        file.write(b"damage")
    with pytest.raises(IntegrityError, match="layer 0"):
        await backend.export_objects(tmp_path / "out")
    assert names_in(tmp_path / "out") == []
    await backend.aclose()


async def test_the_canonical_copy_wins(tmp_path: Path) -> None:
    """Importing replaces an object that is not canonical by one that is, never the other way."""
    plain, best = make_object(1, 0, canonical=False), make_object(1, 1)
    for name, stored in (("plain", plain), ("best", best)):
        (tmp_path / name).mkdir()
        (tmp_path / name / format_name(stored.key)).write_bytes(stored.data)
    backend = await open_store(tmp_path / "store")
    for name, expected in (("plain", plain), ("best", best), ("plain", best)):
        await backend.import_objects(tmp_path / name)
        assert await backend.lookup([plain.key.chunk]) == [[expected.info]]
    await backend.aclose()

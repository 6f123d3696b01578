"""Export and import: objects in one archive file, verified on the way out and on the way in."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import CapacityError, ConfigError, IntegrityError
from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import StoredObject, load_one, make_object
from cacheflow.testing.storage_harness import store_all

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import ChunkInfo

MAGIC = b"CFLWAR1\n"


async def open_store(folder: Path, **options: object) -> NvmeBackend:
    return await NvmeBackend.open({"path": str(folder), **options})


def file_of(folder: Path, stored: StoredObject) -> Path:
    name = format_name(stored.key)
    return folder / "objects" / name[:2] / name


def archive_of(*entries: tuple[str, bytes], count: int | None = None) -> bytes:
    """An archive as it is written, of whatever names and bytes."""
    parts = [MAGIC]
    for name, data in entries:
        encoded = name.encode()
        parts += [struct.pack("<H", len(encoded)), encoded, struct.pack("<Q", len(data)), data]
    total = len(entries) if count is None else count
    return b"".join([*parts, struct.pack("<HQ", 0, total)])


def files_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


async def all_of(backend: NvmeBackend) -> list[ChunkInfo]:
    return [info async for info in backend.scan()]


async def test_export_and_import(tmp_path: Path) -> None:
    """What is exported is imported elsewhere, the same to the byte; importing again keeps it."""
    objects = [make_object(number) for number in range(5)]
    source = await open_store(tmp_path / "source")
    await store_all(source, *objects)
    told: list[int] = []
    archive = tmp_path / "archive"
    assert await source.export_objects(archive, await all_of(source), told.append) == 5
    assert sum(told) == sum(len(each.data) for each in objects)
    target = await open_store(tmp_path / "target")
    assert (await target.import_objects(archive)).stored == 5
    for each in objects:
        assert (await load_one(target, each.key, 0, len(each.data)))[1] == each.data
    again = await target.import_objects(archive)
    assert (again.stored, again.kept) == (0, 5)
    await source.aclose()
    await target.aclose()


async def test_an_archive_is_not_written_over(tmp_path: Path) -> None:
    """A file that is there is left as it is; an object that is gone by now is left out."""
    one, two = make_object(1), make_object(2)
    backend = await open_store(tmp_path / "store")
    await store_all(backend, one, two)
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="File exists"):
        await backend.export_objects(tmp_path / "thesis", [one.info])
    assert (tmp_path / "thesis").read_text() == "years of work"
    await backend.delete([two.key])
    assert await backend.export_objects(tmp_path / "one", [two.info, one.info]) == 1
    assert (tmp_path / "one").read_bytes() == archive_of((format_name(one.key), one.data))
    await backend.aclose()


async def test_import_verifies(tmp_path: Path) -> None:
    """Damaged, truncated and misnamed objects are refused by name and reason, the others stored;
    a name that would lead elsewhere as a path leads nowhere."""
    objects = [make_object(number) for number in range(5)]
    damaged = bytearray(objects[1].data)
    damaged[-1] ^= 1
    contents = [objects[0].data, bytes(damaged), objects[2].data[:-1], objects[4].data, b""]
    entries = [(format_name(o.key), data) for o, data in zip(objects, contents, strict=True)]
    outside = ["../../outside", "/tmp/outside", f"../{format_name(objects[0].key)}", "x"]
    entries[1:1] = [(name, objects[0].data) for name in outside]
    (tmp_path / "archive").write_bytes(archive_of(*entries))
    before = files_in(tmp_path)
    backend = await open_store(tmp_path / "store")
    report = await backend.import_objects(tmp_path / "archive")
    assert (report.stored, report.kept) == (1, 0)
    assert [name for name, _ in report.refused] == [name for name, _ in entries[1:]]
    assert await all_of(backend) == [objects[0].info]
    await backend.aclose()
    outside_store = {p for p in files_in(tmp_path) if not p.is_relative_to(tmp_path / "store")}
    assert outside_store == before


async def test_an_archive_cut_anywhere(tmp_path: Path) -> None:
    """An archive without its end is an IntegrityError wherever it was cut; the whole objects
    before the cut are stored. Other files are not archives."""
    objects = [make_object(number) for number in range(2)]
    whole = archive_of(*((format_name(each.key), each.data) for each in objects))
    first = len(archive_of((format_name(objects[0].key), objects[0].data))) - 10
    backend = await open_store(tmp_path / "store")
    cuts = [*range(8, 120), first - 1, first, first + 1, first + 90, len(whole) - 1]
    for cut in cuts:
        (tmp_path / "archive").write_bytes(whole[:cut])
        with pytest.raises(IntegrityError, match="cut short"):
            await backend.import_objects(tmp_path / "archive")
        assert len(await all_of(backend)) == (cut >= first) + (cut >= len(whole) - 10)
    for data in (b"", b"CFLWAR0\n", b"PK\3\4" * 10, archive_of(count=1), MAGIC + b"\xff" * 20):
        (tmp_path / "archive").write_bytes(data)
        with pytest.raises(IntegrityError):
            await backend.import_objects(tmp_path / "archive")
    with pytest.raises(ConfigError, match="missing"):
        await backend.import_objects(tmp_path / "missing")
    await backend.aclose()


async def test_a_full_store(tmp_path: Path) -> None:
    """Importing into a store that is full is a CapacityError; what was stored so far stays."""
    objects = [make_object(number) for number in range(3)]
    entries = [(format_name(each.key), each.data) for each in objects]
    (tmp_path / "archive").write_bytes(archive_of(*entries))
    backend = await open_store(tmp_path / "store", max_bytes=2 * len(objects[0].data))
    with pytest.raises(CapacityError, match="max_bytes"):
        await backend.import_objects(tmp_path / "archive")
    assert len(await all_of(backend)) == 2
    await backend.aclose()


async def test_export_verifies(tmp_path: Path) -> None:
    """An object whose payload is damaged is not exported: IntegrityError, and no archive."""
    stored = make_object(1)
    backend = await open_store(tmp_path / "store")
    await store_all(backend, stored)
    with file_of(tmp_path / "store", stored).open("r+b") as file:
        file.seek(8192)
        file.write(b"damage")
    with pytest.raises(IntegrityError, match="layer 0"):
        await backend.export_objects(tmp_path / "archive", [stored.info])
    assert not (tmp_path / "archive").exists()
    await backend.aclose()


async def test_the_canonical_copy_wins(tmp_path: Path) -> None:
    """Importing replaces an object that is not canonical by one that is, never the other way."""
    plain, best = make_object(1, 0, canonical=False), make_object(1, 1)
    for name, stored in (("plain", plain), ("best", best)):
        (tmp_path / name).write_bytes(archive_of((format_name(stored.key), stored.data)))
    backend = await open_store(tmp_path / "store")
    for name, expected in (("plain", plain), ("best", best), ("plain", best)):
        await backend.import_objects(tmp_path / name)
        assert await backend.lookup([plain.key.chunk]) == [[expected.info]]
    await backend.aclose()

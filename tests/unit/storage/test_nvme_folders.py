"""Which folders become nvme stores, which are recognised as one, and which are left alone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from tests.unit.storage.nvme_stores import (
    MANIFEST,
    listing,
    make_store,
    open_store,
)

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    """A folder with other files in it is refused by name, and nothing in it changes."""
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(ConfigError, match=r"is not a CacheFlow store.*empty folder"):
        await open_store(tmp_path)
    assert listing(tmp_path) == ["thesis.txt"]


async def test_a_folder_with_objects_but_no_manifest_is_left_alone(tmp_path: Path) -> None:
    """A store that lost its manifest is not taken for an empty folder."""
    await make_store(tmp_path, make_object(1))
    (tmp_path / MANIFEST).unlink()
    before = listing(tmp_path)
    with pytest.raises(ConfigError, match="not a CacheFlow store"):
        await open_store(tmp_path)
    assert listing(tmp_path) == before


async def test_a_store_whose_making_was_cut_short_is_finished(tmp_path: Path) -> None:
    """A process that dies while it makes a store leaves a folder that can still become one."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "half a manifest").touch()
    await make_store(tmp_path, make_object(1))
    assert (tmp_path / MANIFEST).exists()


async def test_many_may_make_the_same_store(tmp_path: Path) -> None:
    """Several openings of one empty folder at once all succeed and see each other's objects."""
    stores = await asyncio.gather(*(open_store(tmp_path / "s") for _ in range(8)))
    for number, backend in enumerate(stores):
        await store_all(backend, make_object(number))
    for backend in stores:
        assert len([info async for info in backend.scan()]) == 8
        await backend.aclose()


async def test_a_missing_folder_is_made_only_when_asked(tmp_path: Path) -> None:
    """Without `create` a missing or empty folder is a ConfigError that names the option."""
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="option create"):
            await open_store(folder, create=False)
    assert listing(tmp_path) == []
    await make_store(tmp_path / "a" / "b")
    await (await open_store(tmp_path / "a" / "b", create=False)).aclose()


async def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """A path to a file, or below one, is a ConfigError."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"file"):
            await open_store(path)


async def test_a_store_of_another_version(tmp_path: Path) -> None:
    """A newer store is a ConfigError that says both versions; a damaged manifest is an
    IntegrityError. Neither changes the folder."""
    await make_store(tmp_path, make_object(1))
    before = listing(tmp_path)
    found = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(found | {"format": 99}))
    with pytest.raises(ConfigError, match=r"format 99, this is format 1"):
        await open_store(tmp_path)
    for damage in (b"", b"{", b"\xff\xfe", b"[]", b'{"kind": "other", "format": 1}'):
        (tmp_path / MANIFEST).write_bytes(damage)
        with pytest.raises(IntegrityError, match=MANIFEST):
            await open_store(tmp_path)
    assert listing(tmp_path) == before


async def test_options_are_checked() -> None:
    """Unknown, missing and impossible options are ConfigErrors that name them."""
    wrong: list[tuple[dict[str, object], str]] = [
        ({}, "path"),
        ({"path": "/x", "colour": "red"}, "colour"),
        ({"path": "/x", "threads": 0}, "threads"),
        ({"path": "/x", "direct": "maybe"}, "direct"),
    ]
    for options, name in wrong:
        with pytest.raises(ConfigError, match=f"'nvme', option '{name}'"):
            await NvmeBackend.open(options)
    with pytest.raises(ConfigError) as caught:  # the misspelt one beside the one that is missing
        await NvmeBackend.open({"pth": "/x", "threads": 0})
    for told in (
        "option 'path': Field required",
        "option 'threads': ",
        "option 'pth': there is no",
    ):
        assert told in str(caught.value)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EACCES, r"Permission denied; let user \d+ write in {parent}, or give another"),
        (errno.EROFS, r"Read-only file system; mount it for writing, or give another folder"),
        (errno.ENOSPC, r"No space left on device$"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
async def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str, is_there: bool
) -> None:
    """The error says which folder, why not, and what to do; one that is there is not `made`."""
    folder = tmp_path / "kv"
    if is_there:
        folder.mkdir()
    real = os.mkdir

    def refuse(path: str, mode: int = 0o777) -> None:
        if os.path.exists(path):  # noqa: PTH110 - as the system does
            real(path, mode)
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "mkdir", refuse)
    done, parent = ("written", folder) if is_there else ("made", tmp_path)
    with pytest.raises(ConfigError, match=f"kv cannot be {done}: {advice.format(parent=parent)}"):
        await open_store(folder)


async def test_only_the_owner_can_read(tmp_path: Path) -> None:
    """Files are 0600 and folders 0700: prompts can be read back from a KV cache."""
    folder = tmp_path / "store"
    await make_store(folder, make_object(1))
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.name != MANIFEST:
            assert mode == (0o700 if path.is_dir() else 0o600), path

"""An archive that is not finished is none: no file is left, and no file is left open."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from cacheflow.errors import ConfigError
from cacheflow.tiers import archive as archives
from cacheflow.tiers.archive import read_archive, write_archive
from tests.cancelling import Held, cancelled_during


def opened_here(path: Path) -> list[str]:
    """Descriptors of this process that lead to ``path``, removed or not."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if str(descriptor.readlink()).removesuffix(" (deleted)") == str(path):
                found.append(descriptor.name)
    return found


async def write(path: Path) -> None:
    async with write_archive(path):
        pass


async def read(path: Path) -> list[str]:
    return [archived.name async for archived in read_archive(path)]


async def test_an_export_cancelled_while_its_file_is_opened_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be tried again under the same name."""
    path, held = tmp_path / "archive", Held(archives._private)
    with monkeypatch.context() as patched:
        patched.setattr(archives, "_private", held)
        await cancelled_during(write(path), held)
    assert opened_here(path) == []
    await write(path)
    assert await read(path) == []


async def test_an_import_cancelled_while_its_file_is_opened_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread opens it all the same."""
    path, held = tmp_path / "archive", Held(archives.open_regular)
    await write(path)
    monkeypatch.setattr(archives, "open_regular", held)
    await cancelled_during(read(path), held)
    assert opened_here(path) == []


async def test_a_disk_that_is_full_at_the_very_end_leaves_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes are written when the file is closed."""

    def full(path: str, flags: int) -> int:
        os.close(os.open(path, flags, 0o600))
        return os.open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(archives, "_private", full)
    with pytest.raises(ConfigError, match="No space left"):
        await write(tmp_path / "archive")
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []

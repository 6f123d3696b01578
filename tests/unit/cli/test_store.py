"""`cacheflow store` on a real folder: what it prints, what it finds, and how it refuses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cacheflow.kv import format_name
from cacheflow.registry import load_backend
from cacheflow.types import ChunkKey, ObjectKey, Span
from tests.unit.cli.stores import CHUNKS, call, figures, object_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_ls_lists_each_object(store: Path) -> None:
    """Every object is listed with its ranges, tokens and dtype; `--json` has its full name."""
    assert len([line for line in call("ls", store).stdout.splitlines() if "float32" in line]) == 4
    objects = figures("ls", store)["objects"]
    assert [row["chunk"] for row in objects] == [bytes([n]).hex() * 32 for n in range(CHUNKS)]
    assert objects[1]["layers"] == [0, 3]
    assert objects[1]["tokens"] == 32
    assert [row["canonical"] for row in objects] == [False, True, True, True]
    assert call("ls", store).stdout.count("0:3") == CHUNKS  # without its end, as in the JSON


def test_a_folder_without_a_store_is_told_in_the_commands_words(tmp_path: Path) -> None:
    """Not by an option of the backend that the command does not have."""
    for folder, why in ((tmp_path / "none", "no such folder; give"), (tmp_path, "is empty: ")):
        told = " ".join(call("ls", folder, code=2).stderr.split())
        assert why in told
        assert "create" not in told


def test_stat_adds_up(store: Path) -> None:
    """The totals are the sums over the objects."""
    totals = figures("stat", store)
    listed = figures("ls", store)["objects"]
    assert totals["objects"] == totals["chunks"] == CHUNKS
    assert totals["canonical_objects"] == CHUNKS - 1
    assert totals["object_bytes"] == sum(row["nbytes"] for row in listed)
    assert totals["grids"] == {"test grid": CHUNKS}
    assert "4 x test grid" in call("stat", store).stdout


def test_verify_accepts_a_sound_store(store: Path) -> None:
    """A store as it was written verifies, and verifying changes nothing."""
    before = {path: path.read_bytes() for path in object_files(store)}
    assert len(before) == CHUNKS
    found = figures("verify", store)
    assert found["objects"] == CHUNKS
    assert found["bad"] == []
    assert found["stray_bytes"] == 0
    assert {path: path.read_bytes() for path in object_files(store)} == before


def test_verify_finds_one_flipped_bit(store: Path) -> None:
    """A single bit flipped in a payload is found, named, and makes the exit code 1."""
    victim = object_files(store)[2]
    data = bytearray(victim.read_bytes())
    data[-5000] ^= 1
    victim.write_bytes(data)
    [bad] = figures("verify", store, code=1)["bad"]
    assert bad["name"].startswith(figures("ls", store)["objects"][2]["name"])
    assert "layer" in bad["error"]
    assert "1 bad" in call("verify", store, code=1).stdout


def test_rm_removes_what_is_named(store: Path) -> None:
    """`rm` takes a key's first digits or a full name, and removes nothing else."""
    third = figures("ls", store)["objects"][2]["name"]
    assert figures("rm", store, "0101", third, "--yes") == {"removed": 2}
    assert [row["chunk"][:2] for row in figures("ls", store)["objects"]] == ["00", "03"]


def test_rm_asks_first(store: Path) -> None:
    """Without `--yes` it asks, and anything but yes removes nothing."""
    call("rm", store, "--all", answer="n\n", code=1)
    assert len(figures("ls", store)["objects"]) == CHUNKS
    call("rm", store, "--all", answer="y\n")
    assert figures("ls", store)["objects"] == []


@pytest.mark.parametrize("key", ["ffff", "0", "00", "../../etc", "*"])
def test_rm_refuses_keys_that_name_nothing(store: Path, key: str) -> None:
    """An unknown key, or one of too few digits, is an error and removes nothing."""
    assert "no stored object" in call("rm", store, key, "--yes", code=2).stderr
    assert len(figures("ls", store)["objects"]) == CHUNKS


@pytest.mark.parametrize("arguments", [[], ["--all", "0101"]])
def test_rm_wants_to_be_told_what(store: Path, arguments: list[str]) -> None:
    """Neither keys nor `--all`, or both, is an error and removes nothing."""
    assert "say what to remove" in call("rm", store, *arguments, code=2).stderr
    assert len(figures("ls", store)["objects"]) == CHUNKS


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "rm --all --yes"])
def test_a_missing_folder_is_named(tmp_path: Path, command: str) -> None:
    """A folder that is not there is one clean line, exit code 2, and is not created."""
    name, *rest = command.split()
    result = call(name, tmp_path / "nowhere", *rest, code=2)
    assert "nowhere" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "rm --all --yes"])
def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path, command: str) -> None:
    """A folder with something else in it is refused, and nothing in it is touched."""
    (tmp_path / "thesis.txt").write_text("years of work")
    name, *rest = command.split()
    result = call(name, tmp_path, *rest, code=2)
    assert "not a CacheFlow store" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_store(tmp_path: Path) -> None:
    """A file where a folder should be is one clean line."""
    (tmp_path / "file").write_text("x")
    assert "file" in call("ls", tmp_path / "file", code=2).stderr


@pytest.fixture
def read_only(store: Path) -> Iterator[Path]:
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    yield store
    for folder in folders:
        folder.chmod(0o700)


def call_as_owner(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command without the right of root to write wherever it likes."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-c", "from cacheflow.cli import main; main()", "store"]
    return subprocess.run(
        [*(drop if os.geteuid() == 0 else []), *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_read_only_store_can_be_read(read_only: Path) -> None:
    """A store that cannot be written is listed and verified all the same."""
    assert call_as_owner("ls", read_only).returncode == 0
    done = call_as_owner("verify", read_only)
    assert (done.returncode, "0 bad" in done.stdout) == (0, True), done.stderr


def test_read_only_store_refuses_to_remove(read_only: Path) -> None:
    """Removing from it is one clean line, exit code 2, and removes nothing."""
    done = call_as_owner("rm", read_only, "--all", "--yes")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert any(line.startswith("error: ") for line in done.stderr.splitlines())
    assert len(object_files(read_only)) == CHUNKS


def test_truncated_object_is_not_listed(store: Path) -> None:
    """A file cut short is no object any more: not listed, and `verify` says that it lies there."""
    victim = object_files(store)[0]
    os.truncate(victim, victim.stat().st_size - 4096)
    assert len(figures("ls", store)["objects"]) == CHUNKS - 1
    found = figures("verify", store, code=1)
    assert found["stray_bytes"] == victim.stat().st_size
    assert found["bad"] == []


def test_names_survive_json(store: Path) -> None:
    """The names that `ls --json` prints are those that the store's keys format to."""
    key = ObjectKey(ChunkKey(bytes(32)), Span(0, 3), Span(0, 2))
    assert figures("ls", store)["objects"][0]["name"] == format_name(key)


# -- carrying --------------------------------------------------------------------------------------


def test_export_and_import(store: Path, tmp_path: Path) -> None:
    """Chosen objects go into one file and out of it into another store, byte for byte."""
    archive, other = tmp_path / "archive", tmp_path / "other"
    asyncio.run(make(other))
    keys = tmp_path / "keys"
    keys.write_text("01010101\n02020202\n")
    found = figures("export", store, archive, "--keys", keys)
    assert (found["exported"], archive.stat().st_mode & 0o777) == (2, 0o600)
    assert figures("import", other, archive) == {"stored": 2, "kept": 0, "refused": []}
    assert figures("import", other, archive) == {"stored": 0, "kept": 2, "refused": []}
    for file in object_files(other):
        assert file.read_bytes() == (store / file.relative_to(other)).read_bytes()
    assert "File exists" in call("export", store, archive, "--all", code=2).stderr


async def make(folder: Path) -> None:
    await (await load_backend("nvme").open({"path": str(folder)})).aclose()


def test_import_names_what_is_no_archive(store: Path, tmp_path: Path) -> None:
    """And what was cut short."""
    letter = tmp_path / "letter.txt"
    letter.write_text("dear reader")
    told = call("import", store, letter, code=2).stderr
    assert "letter.txt: it is no archive of CacheFlow objects" in " ".join(told.split())


def test_import_refuses_what_is_damaged(store: Path, tmp_path: Path) -> None:
    """An object damaged on its way is refused by name, exit code 1; the others are stored."""
    archive, other = tmp_path / "archive", tmp_path / "other"
    asyncio.run(make(other))
    call("export", store, archive, "--all")
    data = bytearray(archive.read_bytes())
    data[-5000] ^= 1
    archive.write_bytes(data)
    found = figures("import", other, archive, code=1)
    assert (found["stored"], len(found["refused"])) == (CHUNKS - 1, 1)
    assert "layer" in found["refused"][0]["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--all", "0101"),
        ("--tokens", "/nowhere"),
        ("--keys", "/nowhere"),
        ("--tokens", "/nowhere", "--model", "/nowhere"),
    ],
)
def test_export_wants_to_be_told_what(
    store: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Nothing chosen, two ways at once, tokens without a model, or no file: refused, no archive."""
    call("export", store, tmp_path / "archive", *arguments, code=2)
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "rm", "gc", "invalidate", "export"])
def test_help(command: str) -> None:
    """Each subcommand explains itself."""
    assert "store" in call(command, "--help").stdout.lower()

"""`cacheflow store` on a real folder: what it prints, what it finds, and how it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.kv import format_name, seal
from cacheflow.memory import buffer_from
from cacheflow.registry import load_backend
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Segment, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=32)
CHUNKS = 4


def call(*arguments: object, code: int = 0, answer: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], input=answer)
    assert result.exit_code == code, result.output
    return result


def figures(*arguments: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(call(*arguments, "--json", code=code).stdout)
    assert isinstance(found, dict)
    return found


async def fill(folder: Path) -> None:
    backend = await load_backend("nvme").open({"path": str(folder), "create": True})
    try:
        for number in range(CHUNKS):
            key = ObjectKey(ChunkKey(bytes([number]) * 32), Span(0, 3), Span(0, 2))
            payload = bytearray(os.urandom(LAYOUT.payload_bytes()))
            info, header = seal(
                key,
                LAYOUT,
                memoryview(payload),
                grid_id="test grid",
                segments=(Segment(32 * number, 32 * number + 32, 32),),
                canonical=number > 0,
            )
            parts = (buffer_from(header), buffer_from(payload))
            [result] = await backend.store([Write(info, parts)])
            assert result.status is TransferStatus.OK
    finally:
        await backend.aclose()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    asyncio.run(fill(folder))
    return folder


def object_files(store: Path) -> list[Path]:
    """The large files among the objects."""
    size = LAYOUT.payload_bytes()
    objects = (store / "objects").rglob("*")
    return sorted(p for p in objects if p.is_file() and p.stat().st_size > size)


def test_ls_lists_each_object(store: Path) -> None:
    """Every object is listed with its ranges, tokens and dtype; `--json` has its full name."""
    assert len([line for line in call("ls", store).stdout.splitlines() if "float32" in line]) == 4
    objects = figures("ls", store)["objects"]
    assert [row["chunk"] for row in objects] == [bytes([n]).hex() * 32 for n in range(CHUNKS)]
    assert objects[1]["layers"] == [0, 3]
    assert objects[1]["tokens"] == 32
    assert [row["canonical"] for row in objects] == [False, True, True, True]


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

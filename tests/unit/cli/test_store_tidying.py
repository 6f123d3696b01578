"""`cacheflow store` that removes: what is damaged, old, too much, or somebody's."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from cacheflow.kv import Stamp, seal, tenant_id
from cacheflow.memory import buffer_from
from cacheflow.registry import load_backend
from cacheflow.types import ChunkKey, ObjectKey, Span, TransferStatus, Write
from tests.unit.cli.stores import CHUNKS, LAYOUT, call, figures, object_files

if TYPE_CHECKING:
    from pathlib import Path


def damage(store: Path) -> None:
    """One flipped bit, one truncated object, and a file that was never an object."""
    flipped, cut, *_ = object_files(store)
    data = bytearray(flipped.read_bytes())
    data[-5000] ^= 1
    flipped.write_bytes(data)
    os.truncate(cut, 5000)
    (store / "objects" / "notes.txt").write_text("mine")


def test_verify_repairs(store: Path) -> None:
    """`--repair` removes what is damaged, asks first, leaves alone what is not ours, and afterwards
    accounts and files agree."""
    damage(store)
    found = figures("verify", store, code=1)
    assert (len(found["bad"]), found["invalid"], found["removed"]) == (1, 1, 0)
    call("verify", store, "--repair", answer="n\n", code=1)
    assert len(object_files(store)) + 1 == CHUNKS  # the truncated one is no large file any more
    found = figures("verify", store, "--repair", "--yes", code=1)
    assert (found["removed"], found["foreign"]) == (2, [str(store / "objects" / "notes.txt")])
    (store / "objects" / "notes.txt").unlink()
    found = figures("verify", store)
    assert (found["objects"], found["stray_bytes"]) == (CHUNKS - 2, 0)
    assert figures("stat", store)["used_bytes"] == sum(
        p.stat().st_size for p in object_files(store)
    )


def test_gc_removes_the_oldest(store: Path) -> None:
    """Down to what is asked for, oldest first, and nothing when there is nothing to do."""
    files = object_files(store)
    for age, file in enumerate(reversed(files)):
        os.utime(file, (1e9 - age, 1e9 - age))
    size = files[0].stat().st_size
    assert figures("gc", store)["removed"] == 0
    found = figures("gc", store, "--to", 2 * size, "--yes")
    assert (found["removed"], found["used_bytes"]) == (2, 2 * size)
    assert object_files(store) == files[2:]
    call("gc", store, "--to", "1KiB", answer="n\n", code=1)
    assert len(object_files(store)) == 2


def test_gc_removes_what_is_too_old(store: Path) -> None:
    """By age, whatever the size."""
    files = object_files(store)
    os.utime(files[1], (1e9, 1e9))
    assert figures("gc", store, "--older-than", "7d", "--yes")["removed"] == 1
    assert object_files(store) == [files[0], *files[2:]]


@pytest.mark.parametrize("arguments", [("--to", "much"), ("--older-than", "old")])
def test_gc_says_what_it_does_not_understand(store: Path, arguments: tuple[str, str]) -> None:
    """A size or an age that is none is refused with examples of what would be."""
    assert "is not a" in " ".join(call("gc", store, *arguments, code=2).stderr.split())


def test_limits_come_from_the_settings(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stat` shows, and `gc` keeps to, the cap and the age of the tier that has the folder."""
    size = object_files(store)[0].stat().st_size
    options = {"path": str(store), "max_bytes": 3 * size, "min_free_bytes": 7}
    tiers = [{"name": "disk", "backend": "nvme", "options": options}]
    monkeypatch.setenv("CACHEFLOW_TIERS", json.dumps(tiers))
    totals = figures("stat", store)
    assert (totals["cap_bytes"], totals["floor_bytes"]) == (3 * size, 7)
    assert figures("gc", store, "--yes")["removed"] == 1
    os.utime(object_files(store)[0], (1e9, 1e9))
    monkeypatch.setenv("CACHEFLOW_TIERS", json.dumps([tiers[0] | {"ttl": 3600}]))
    assert figures("gc", store, "--yes")["removed"] == 1


def test_what_the_dead_left_is_removed(store: Path) -> None:
    """Opening the store is enough; what other tools put elsewhere is not touched."""
    (store / "tmp" / "0123456789abcdef").write_bytes(bytes(1000))
    call("gc", store)
    assert list((store / "tmp").iterdir()) == []


# -- invalidating ----------------------------------------------------------------------------------


async def fill_for(folder: Path, model: bytes, tenant: bytes) -> None:
    backend = await load_backend("nvme").open({"path": str(folder), "fsync": False})
    try:
        key = ObjectKey(ChunkKey(model + tenant), Span(0, 3), Span(0, 2))
        payload = bytearray(LAYOUT.payload_bytes())
        stamp = Stamp(model, tenant)
        info, header = seal(
            key,
            LAYOUT,
            memoryview(payload),
            grid_id="test grid",
            segments=(),
            canonical=True,
            stamp=stamp,
        )
        parts = (buffer_from(header), buffer_from(payload))
        [result] = await backend.store([Write(info, parts)])
        assert result.status is TransferStatus.OK
    finally:
        await backend.aclose()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Two models, two tenants, each with each."""
    for model in (b"M" * 16, b"N" * 16):
        for tenant in (tenant_id(b"secret"), tenant_id()):
            asyncio.run(fill_for(tmp_path / "shared", model, tenant))
    return tmp_path / "shared"


def left_in(store: Path) -> set[tuple[str, str]]:
    return {(row["model"], row["tenant"]) for row in figures("ls", store)["objects"]}


def test_invalidate_a_model(shared: Path) -> None:
    """All objects of one model go, whoever's they are, and no others."""
    assert figures("stat", shared)["models"] == {"4d" * 16: 2, "4e" * 16: 2}
    assert figures("invalidate", shared, "--model", "4d4d4d", "--yes") == {"removed": 2}
    assert {model for model, _ in left_in(shared)} == {"4e" * 16}


def test_invalidate_a_tenant_by_its_salt(shared: Path, tmp_path: Path) -> None:
    """All objects stored under a salt go; the salt comes from a file, not from the command line."""
    (tmp_path / "salt").write_bytes(b"secret\n")
    call("invalidate", shared, "--salt", tmp_path / "salt", answer="y\n")
    assert {tenant for _, tenant in left_in(shared)} == {tenant_id().hex()}


def test_invalidate_one_tenants_model(shared: Path) -> None:
    """Both together name what is both."""
    tenant = tenant_id().hex()
    assert figures("invalidate", shared, "--model", "4D4D", "--tenant", tenant[:8], "--yes") == {
        "removed": 1
    }
    assert ("4d" * 16, tenant) not in left_in(shared)
    assert len(left_in(shared)) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--model", "4d"),
        ("--model", "model"),
        ("--salt", "/nowhere"),
        ("--tenant", "0000", "--salt", "/nowhere"),
    ],
)
def test_invalidate_wants_to_be_told_whose(shared: Path, arguments: tuple[str, ...]) -> None:
    """No selection, two of one kind, too few digits, no digits, or no file: refused, untouched."""
    call("invalidate", shared, *arguments, "--yes", code=2)
    assert len(left_in(shared)) == 4

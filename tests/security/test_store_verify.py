"""`cacheflow store verify` on a store of compressed chunks that others may have written to."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.kv import ChunkAuth, Stamp, format_name, seal
from cacheflow.memory import buffer_from
from cacheflow.registry import load_backend
from cacheflow.tiers import Encoded
from cacheflow.types import ChunkKey, Codec, KVLayout, ObjectKey, Span, TransferStatus, Write

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
SECRET = "the secret of those who write"
OURS, THEIRS = (ObjectKey(ChunkKey(bytes([n]) * 32), Span(0, 3), Span(0, 2)) for n in (1, 2))


async def fill(folder: Path) -> None:
    """One authenticated chunk and one that is not, both compressed, with blocks of other sizes."""
    inner = await load_backend("nvme").open({"path": str(folder), "fsync": False})
    try:
        for key, auth in ((OURS, ChunkAuth(SECRET.encode())), (THEIRS, None)):
            count = LAYOUT.payload_bytes() // 4
            numbers = (float(i % (5 + 4000 * (i // 4096))) for i in range(count))
            payload = bytearray(struct.pack(f"<{count}f", *numbers))
            info, header = seal(
                key, LAYOUT, memoryview(payload), grid_id="g", segments=(), canonical=True
            )
            tier = Encoded(inner, Codec.ZSTD, Stamp(auth=auth))
            write = Write(info, (buffer_from(header), buffer_from(payload)))
            [result] = await tier.store([write])
            assert result.status is TransferStatus.OK
    finally:
        await inner.aclose()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    asyncio.run(fill(tmp_path / "store"))
    return tmp_path / "store"


def figures(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["store", *arguments, "--json"])
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_verify_reads_what_is_encoded(store: Path) -> None:
    """Blocks of different sizes are verified as they are stored; a flipped bit is found."""
    assert {row["codec"] for row in figures("ls", str(store))["objects"]} == {"zstd"}
    assert figures("verify", str(store))["bad"] == []
    [victim] = [path for path in store.rglob("*") if path.name == format_name(THEIRS)]
    data = bytearray(victim.read_bytes())
    data[-4097] ^= 1
    victim.write_bytes(data)
    [bad] = figures("verify", str(store), code=1)["bad"]
    assert bad["name"] == format_name(THEIRS)


def test_verify_tells_who_wrote(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --auth and the secret, what others wrote is bad, and --repair takes it out."""
    monkeypatch.setenv("CACHEFLOW_AUTH_KEY", SECRET)
    [bad] = figures("verify", str(store), "--auth", code=1)["bad"]
    assert bad["name"] == format_name(THEIRS)
    assert "not authenticated" in bad["error"]
    assert figures("verify", str(store), "--auth", "--repair", "--yes")["removed"] == 1
    assert [row["authenticated"] for row in figures("ls", str(store))["objects"]] == [True]


def test_the_secret_is_asked_for(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--auth without a secret is a mistake that is named."""
    monkeypatch.delenv("CACHEFLOW_AUTH_KEY", raising=False)
    result = CliRunner().invoke(app, ["store", "verify", str(store), "--auth"])
    assert result.exit_code == 2
    assert "CACHEFLOW_AUTH_KEY" in result.output

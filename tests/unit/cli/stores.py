"""A store in a real folder, and `cacheflow store` called on it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.kv import seal
from cacheflow.memory import buffer_from
from cacheflow.registry import load_backend
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Segment, Span, TransferStatus, Write

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

__all__ = ["CHUNKS", "LAYOUT", "call", "figures", "fill", "object_files"]

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
    backend = await load_backend("nvme").open({"path": str(folder), "fsync": False})
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


def object_files(store: Path) -> list[Path]:
    """The large files among the objects."""
    size = LAYOUT.payload_bytes()
    objects = (store / "objects").rglob("*")
    return sorted(p for p in objects if p.is_file() and p.stat().st_size > size)

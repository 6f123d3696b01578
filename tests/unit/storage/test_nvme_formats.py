"""Objects of another chunk format in an nvme store."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheflow.kv import format_name
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import make_object

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_a_chunk_of_format_1_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier version stored is not listed, which is said once with the reason; storing the
    chunk again replaces it."""
    stored = make_object(0)
    backend = await NvmeBackend.open({"path": str(tmp_path / "store"), "fsync": False})
    try:
        await backend.store([stored.write()])
        paths = await asyncio.to_thread(lambda: list(tmp_path.rglob(format_name(stored.key))))
        await asyncio.to_thread(paths[0].write_bytes, b"CFLWKV1\n" + stored.data[8:])
        with caplog.at_level(logging.WARNING):
            assert await backend.lookup([stored.key.chunk]) == [[]]
            assert await backend.lookup([stored.key.chunk]) == [[]]
        assert [info async for info in backend.scan()] == []
        [message] = [record.getMessage() for record in caplog.records]
        assert "a chunk of format 1, this version reads format 2" in message
        await backend.store([stored.write()])
        assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
    finally:
        await backend.aclose()

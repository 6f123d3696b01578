"""Opening a store again with 100,000 objects in it, and looking chunks up in it.

Writes small objects (8 KiB: what costs is their number), opens the folder, rebuilds the index from
the headers, and looks up prefixes of 64 chunks at random: the first time, again, and while another
store writes to the same folder. Then stops and opens again, now with a second user who is there
already, so that nothing has to be counted.

    make bench-reopen ARGS="--objects 100000"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cacheflow.kv import encode_header, format_name
from cacheflow.memory import buffer_from
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import make_object
from cacheflow.types import ChunkKey, ObjectKey, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo

PREFIX = 64
"""Chunks of one lookup: a prompt of 16,384 tokens."""
LOOKUPS = 200


def fill(folder: Path, count: int) -> list[ChunkKey]:
    """Write ``count`` objects as the store would have left them."""
    asyncio.run(_make(folder))
    chance = random.Random(1)
    model = make_object(1, layers=Span(0, 1), heads=Span(0, 1))
    chunks = []
    for fan in range(256):
        (folder / "objects" / f"{fan:02x}").mkdir(mode=0o700)
    for _ in track(range(count), "writing objects", console=Console(stderr=True), transient=True):
        chunk = ChunkKey(chance.randbytes(32))
        name = format_name(ObjectKey(chunk, Span(0, 1), Span(0, 1)))
        (folder / "objects" / name[:2] / name).write_bytes(
            _bytes(model.info, chunk) + model.payload
        )
        chunks.append(chunk)
    return chunks


def _bytes(info: ChunkInfo, chunk: ChunkKey) -> bytes:
    return encode_header(replace(info, key=ObjectKey(chunk, Span(0, 1), Span(0, 1))))


async def _make(folder: Path) -> None:
    await (await NvmeBackend.open({"path": str(folder)})).aclose()


def forget_pages(folder: Path) -> None:
    """Ask the system to drop the files' bytes from its cache (names and inodes stay)."""
    os.sync()
    for path in (folder / "objects").glob("*/*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def reopen(folder: Path, what: str) -> tuple[NvmeBackend, dict[str, float]]:
    """Open and scan; seconds of both."""
    start = time.monotonic()
    backend = await NvmeBackend.open({"path": str(folder)})
    opened = time.monotonic() - start
    count = 0
    async for _ in backend.scan():
        count += 1
    scanned = time.monotonic() - start - opened
    return backend, {f"{what}: open": opened, f"{what}: scan": scanned, f"{what}: objects": count}


async def lookups(backend: StorageBackend, chunks: Sequence[ChunkKey]) -> list[float]:
    """Milliseconds of looking up prefixes, all of whose chunks are there."""
    chance = random.Random(2)
    taken = []
    for _ in range(LOOKUPS):
        keys = chance.sample(chunks, PREFIX)
        start = time.monotonic()
        found = await backend.lookup(keys)
        taken.append(1e3 * (time.monotonic() - start))
        assert all(found)
    return taken


async def while_written(
    backend: StorageBackend, folder: Path, chunks: Sequence[ChunkKey]
) -> list[float]:
    """Lookups while another store of the same folder stores one object after another."""
    other = await NvmeBackend.open({"path": str(folder), "fsync": False})
    stop = asyncio.Event()

    async def write() -> int:
        stored = 0
        while not stop.is_set():
            each = make_object(stored, layers=Span(0, 1), heads=Span(0, 1))
            parts = (buffer_from(each.header), buffer_from(each.payload))
            [result] = await other.store([Write(each.info, parts)])
            assert result.status is TransferStatus.OK, result
            stored += 1
        return stored

    writer = asyncio.create_task(write())
    taken = await lookups(backend, chunks)
    stop.set()
    await writer
    await other.aclose()
    return taken


def ends(name: str, taken: Iterable[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    parts = statistics.quantiles(taken, n=100)
    return {f"{name}: p50 ms": parts[49], f"{name}: p99 ms": parts[98]}


async def measure(folder: Path, chunks: Sequence[ChunkKey], *, cold: bool) -> dict[str, float]:
    """All figures, in the order taken."""
    figures: dict[str, float] = {}
    if cold:
        await asyncio.to_thread(forget_pages, folder)
        backend, found = await reopen(folder, "headers not in memory")
        figures |= found
        await backend.aclose()
    backend = await NvmeBackend.open({"path": str(folder)})
    figures |= ends("lookup of 64, first", await lookups(backend, chunks))
    await backend.aclose()
    backend, found = await reopen(folder, "alone")
    figures |= found
    figures |= ends("lookup of 64, indexed", await lookups(backend, chunks))
    figures |= ends("lookup of 64, while written", await while_written(backend, folder, chunks))
    second, found = await reopen(folder, "beside another")
    figures |= found
    await second.aclose()
    await backend.aclose()
    return figures


def main() -> None:
    """Write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to make the store (default: temporary)")
    parser.add_argument("--hot", action="store_true", help="leave out the run from the disk")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="reopen-") as scratch:
        folder = Path(scratch) / "store"
        chunks = fill(folder, options.objects)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(measure(folder, chunks, cold=not options.hot))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("what", "figure")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()

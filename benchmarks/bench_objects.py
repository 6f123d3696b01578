"""The object store tier against bare obstore, in one run and interleaved.

Reads into the caller's memory against obstore's own ``get_range_async`` with as many requests in
flight (which leaves the bytes in memory of its own), single reads one after another, whole writes,
lookups of 64 chunks against bare listings and HEADs, and what the one copy of our own costs. On a
SeaweedFS started here (same machine: server and client share its cores), or on ``--url`` with the
credentials of the environment. Medians of rounds, with the spread of the paired ratios.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.kv import seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.storage_backends.object_store import ObjectStoreBackend
from cacheflow.storage_backends.object_store.copying import copy_into
from cacheflow.storage_backends.object_store.names import folder_of, path_of
from cacheflow.testing.s3_server import running_s3
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Read, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.types import ChunkInfo

MIB = 1 << 20
DEPTH = 16
"""Requests in flight."""
CHUNKS = 64
"""Chunks of a lookup."""


@dataclass(slots=True)
class Row:
    """One comparison: seconds of ours and of the reference, round by round."""

    name: str
    reference: str
    nbytes: int = 0
    """Bytes moved in these seconds; 0: a latency."""
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ratios = [b / a for a, b in zip(self.ours, self.theirs, strict=True)]
        return {
            "name": self.name,
            "reference": self.reference,
            "bytes": self.nbytes,
            "seconds": statistics.median(self.ours),
            "reference_seconds": statistics.median(self.theirs),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": len(ratios),
        }


def make_write(number: int, size: int) -> Write:
    """An object with ``size`` bytes of payload in one layer."""
    layout = KVLayout(1, size // (2 * 256 * 128 * 4), 128, "float32")
    payload = bytearray(random.Random(number).randbytes(4096) * (size // 4096))
    chunk = ChunkKey(random.Random(f"{size} {number}").randbytes(32))
    key = ObjectKey(chunk, Span(0, 1), Span(0, layout.num_kv_heads))
    info, header = seal(
        key, layout, memoryview(payload), grid_id="bench", segments=(), canonical=True
    )
    return Write(info, (buffer_from(header), buffer_from(payload)))


async def timed(work: Awaitable[object]) -> float:
    """Seconds until ``work`` is done."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def at_once(limit: int, works: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Run ``works``, ``limit`` at a time."""
    todo = iter(works)

    async def worker() -> None:
        for work in todo:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(worker())


async def load(backend: ObjectStoreBackend, reads: Sequence[Read]) -> None:
    """All reads in one load."""
    async for result in backend.load(reads):
        assert result.status is TransferStatus.OK, result


async def compare(
    row: Row, rounds: int, ours: Callable[[], Awaitable[object]], theirs: Callable[[], Any]
) -> Row:
    """Both, in turns, in an order that changes."""
    for number in range(rounds):
        for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            if who == "ours":
                row.ours.append(await timed(ours()))
            else:
                row.theirs.append(await timed(theirs()))
    return row


async def bench_transfers(
    backend: ObjectStoreBackend, size: int, count: int, rounds: int
) -> list[Row]:
    """Reads in flight together, reads alone, and writes of ``count`` objects."""
    bare = backend._store
    writes = [make_write(number, size) for number in range(count)]
    paths = [path_of(write.info.key) for write in writes]
    offset = writes[0].info.payload_offset
    name = f"{size // MIB} MiB"
    pool = StagingPool(count * size)
    pool.view[:] = bytes(len(pool.view))  # touch it: page faults are not what is measured
    with await pool.lease(count * size) as lease:
        reads = [
            Read(write.info.key, offset, lease.part(at * size, size))
            for at, write in enumerate(writes)
        ]

        async def put(at: int) -> None:
            views: list[Any] = [part.view for part in writes[at].parts]
            large = writes[at].nbytes > backend.options.part_bytes
            await bare.put_async(paths[at], views, use_multipart=large)

        async def store() -> None:
            for result in await backend.store(writes):
                assert result.status is TransferStatus.OK, result

        def get(at: int) -> Awaitable[object]:
            return bare.get_range_async(paths[at], start=offset, length=size)

        async def alone(each: Callable[[int], Awaitable[object]]) -> None:
            for at in range(count):
                await each(at)

        all_puts = [lambda at=at: put(at) for at in range(count)]
        all_gets = [lambda at=at: get(at) for at in range(count)]
        rows = [
            await compare(
                Row(f"write {name}", f"put x{backend.options.writers}", count * size),
                max(2, rounds // 3),
                store,
                lambda: at_once(backend.options.writers, all_puts),
            ),
            await compare(
                Row(f"read {name}, {DEPTH} at once", f"get_range x{DEPTH}", count * size),
                rounds,
                lambda: load(backend, reads),
                lambda: at_once(DEPTH, all_gets),
            ),
            await compare(
                Row(f"read {name}, one by one", "get_range", count * size),
                rounds,
                lambda: alone(lambda at: load(backend, [reads[at]])),
                lambda: alone(get),
            ),
        ]
        rows.append(await our_copy(name, reads[0], await get(0), count, rows[2]))
    await backend.delete([write.info.key for write in writes])
    await pool.aclose()
    return rows


async def our_copy(name: str, read: Read, data: Any, count: int, alone: Row) -> Row:
    """The copy into the caller's memory that bare reads do not make, beside those reads."""
    copies = [lambda: asyncio.to_thread(copy_into, read.buffer, data)] * count
    row = Row(f"our copy of {name}", "get_range", count * len(data))
    row.theirs = list(alone.theirs)
    row.ours = [await timed(at_once(1, copies)) for _ in row.theirs]
    return row


async def bench_lookup(backend: ObjectStoreBackend, rounds: int) -> list[Row]:
    """The first lookup of a process and the later ones, against bare requests."""
    bare = backend._store
    writes = [make_write(number, 256 << 10) for number in range(CHUNKS)]
    await backend.store(writes)
    chunks = [write.info.key.chunk for write in writes]
    infos: list[ChunkInfo] = [write.info for write in writes]

    async def lookup(fresh: bool) -> None:
        if fresh:
            backend._headers._known.clear()
        found = await backend.lookup(chunks)
        assert all(found)

    async def listing(chunk: ChunkKey) -> None:
        async for _ in bare.list(folder_of(chunk)):
            pass

    lists = [lambda chunk=chunk: listing(chunk) for chunk in chunks]
    heads = [lambda info=info: bare.head_async(path_of(info.key)) for info in infos]
    limit = backend.options.concurrency
    what = f"lookup of {CHUNKS} chunks"
    rows = [
        await compare(
            Row(f"{what}, first", f"{CHUNKS} listings"),
            rounds,
            lambda: lookup(True),
            lambda: at_once(limit, lists),
        ),
        await compare(
            Row(f"{what}, later", f"{CHUNKS} listings"),
            rounds,
            lambda: lookup(False),
            lambda: at_once(limit, lists),
        ),
        await compare(
            Row(f"{what}, later", f"{CHUNKS} HEADs"),
            rounds,
            lambda: lookup(False),
            lambda: at_once(limit, heads),
        ),
    ]
    await backend.delete([info.key for info in infos])
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    result = Table(title="object store: medians; ratio = reference time / our time")
    result.add_column("what", no_wrap=True)
    for name in ("ours", "reference", "bare", "ratio", "min - max"):
        result.add_column(name, justify="right")
    for row in rows:
        ours, theirs = (figure(row, name) for name in ("seconds", "reference_seconds"))
        spread = f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}"
        result.add_row(row["name"], ours, row["reference"], theirs, f"{row['ratio']:.2f}", spread)
    return result


def figure(row: dict[str, Any], name: str) -> str:
    """A rate where bytes were moved, milliseconds elsewhere."""
    if row["bytes"]:
        return f"{row['bytes'] / row[name] / 1e6:.0f} MB/s"
    return f"{1e3 * row[name]:.1f} ms"


async def main(options: argparse.Namespace, where: dict[str, object]) -> None:
    """Run and print."""
    backend = await ObjectStoreBackend.open({**where, "concurrency": options.concurrency})
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("transfers", total=1 + len(options.sizes))
        for size in options.sizes:
            count = max(4, options.mib // size)
            rows += await bench_transfers(backend, size * MIB, count, options.rounds)
            bar.advance(task)
        bar.update(task, description="lookups")
        rows += await bench_lookup(backend, options.rounds)
        bar.advance(task)
    await backend.aclose()
    summaries = [row.summary() for row in rows]
    if options.json:
        print(json.dumps({"url": where["url"], "rows": summaries}))
    else:
        Console().print(table(summaries))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a store to use instead, e.g. s3://bucket/prefix")
    parser.add_argument("--endpoint", help="with --url: where an S3-compatible server listens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=128, help="bytes moved in each round, in MiB")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32], help="of objects, MiB")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run() -> None:
    """Start a server unless one is named."""
    options = parse()
    with ExitStack() as stack:
        if options.url:
            where = {"url": options.url, "endpoint": options.endpoint}
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(running_s3(Path(folder)))
            os.environ.update(server.environment)
            where = server.options("bench")
        uvloop.run(main(options, where))


if __name__ == "__main__":
    run()

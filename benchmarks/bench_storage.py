"""Storage backends against the bare machine, in one run and interleaved.

nvme reads against fio (psync, O_DIRECT, the very same files, as many jobs as the backend has
threads), a dram tier against memcpy on as many threads (with and without verifying checksums),
throttled links against what they are set to, warm lookups of a prefix, and how long making a
prompt's keys holds up the event loop. Medians of rounds, with the spread of the paired ratios.

"dram into KV" is the whole way from the tier into KV memory, as the restorer goes it, with one
thread for the engine's copy: lent bytes are copied once, from where they are stored (reading them
costs nothing by itself); staged ones are copied out of the tier first, as by backends that do not
lend. "dram load" is that first copy alone, on the backend's threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from storage_paths import Copying, into_memory, tier_over
from storage_reference import fio, memcpy

from cacheflow.kv import chunk_keys, extend_keys, format_name, key_root, seal, verify
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.session import TOKENS_IN_ONE_GO
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from cacheflow.tiers import Guarded
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Read, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.tiers.tier import Tier
    from cacheflow.types import Buffer, ChunkInfo

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB)
DEPTH = 4
"""Loads at a time."""
KEY_TOKENS = (8_192, 32_768, 131_072)
"""Prompt lengths whose keys are made."""
LINKS = ((100 << 10, 2e6), (100 << 10, 200e6), (MIB, 25e6), (8 * MIB, 200e6))
"""Unit of reading and bandwidth."""


@dataclass(slots=True)
class Row:
    """One comparison: bytes a second of ours and of the reference, round by round."""

    name: str
    reference: str
    target: float | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        return {
            "name": self.name,
            "reference": self.reference,
            "bytes_per_second": statistics.median(self.ours),
            "reference_bytes_per_second": statistics.median(self.theirs),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "target": self.target,
            "rounds": len(ratios),
        }


Ways: TypeAlias = "dict[str, tuple[Row | None, Callable[[], Awaitable[float]]]]"
"""By name: its row (None: it is only a reference), and one round, in bytes a second."""


def layout_of(size: int) -> KVLayout:
    """One layer of exactly ``size`` bytes (a multiple of 256 KiB)."""
    return KVLayout(1, size // (2 * 256 * 128 * 4), 128, "float32")


async def fill(backend: StorageBackend, size: int, count: int) -> list[ChunkInfo]:
    """Store ``count`` objects with ``size`` bytes of payload."""
    layout, infos = layout_of(size), []
    payload = bytearray(random.Random(size).randbytes(size))
    for number in range(count):
        payload[:8] = number.to_bytes(8, "little")
        chunk = ChunkKey(random.Random(f"{size} {number}").randbytes(32))
        key = ObjectKey(chunk, Span(0, 1), Span(0, layout.num_kv_heads))
        info, header = seal(
            key, layout, memoryview(payload), grid_id="bench", segments=(), canonical=True
        )
        parts = (buffer_from(header), buffer_from(payload))
        [result] = await backend.store([Write(info, parts)])
        assert result.status is TransferStatus.OK, result
        infos.append(info)
    return infos


async def load_all(
    backend: StorageBackend,
    ranges: Sequence[tuple[ChunkInfo, int, int]],
    depth: int,
    batch: int = 1,
    then: Callable[[ChunkInfo, memoryview], None] | None = None,
) -> float:
    """Bytes a second of reading ``ranges`` (info, offset, bytes), ``batch`` of them in each of
    ``depth`` loads at a time (a restore reads the chunks of a tile in one load), over and over into
    the same memory, as what they are compared with does. ``then`` runs on a thread with what has
    arrived, before its load counts as ended."""
    room = max(nbytes for _, _, nbytes in ranges)
    pool = StagingPool(depth * batch * room)
    loop, verifiers = asyncio.get_running_loop(), ThreadPoolExecutor(2)
    batches = iter([ranges[at : at + batch] for at in range(0, len(ranges), batch)])

    async def worker() -> None:
        with await pool.lease(batch * room) as lease:
            for some in batches:
                buffers = [lease.part(at * room, item[2]) for at, item in enumerate(some)]
                reads = [
                    Read(info.key, offset, buffer)
                    for (info, offset, _), buffer in zip(some, buffers, strict=True)
                ]
                async for result in backend.load(reads):
                    assert result.status is TransferStatus.OK, result
                if then is not None:
                    await loop.run_in_executor(verifiers, each, then, some, buffers)

    pool.view[:] = bytes(len(pool.view))  # touch it: page faults are not what is measured
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(depth):
            group.create_task(worker())
    seconds = time.perf_counter() - start
    verifiers.shutdown()
    await pool.aclose()
    return sum(nbytes for _, _, nbytes in ranges) / seconds


def each(
    then: Callable[[ChunkInfo, memoryview], None],
    some: Sequence[tuple[ChunkInfo, int, int]],
    buffers: Sequence[Buffer],
) -> None:
    """``then`` for each of a batch."""
    for (info, _, _), buffer in zip(some, buffers, strict=True):
        assert buffer.view is not None
        then(info, buffer.view)


def payloads(infos: Sequence[ChunkInfo]) -> list[tuple[ChunkInfo, int, int]]:
    """The whole payload of each object, as a range."""
    return [(info, info.payload_offset, info.nbytes - info.payload_offset) for info in infos]


async def bench_nvme(
    folder: Path, options: argparse.Namespace, tick: Callable[[], None]
) -> list[Row]:
    """Reads of whole payloads against fio on the same files."""
    rows = []
    for size in SIZES:
        backend = await NvmeBackend.open({"path": str(folder), "threads": options.threads})
        row = Row(f"nvme read {size // MIB} MiB", f"fio psync x{options.threads}", 0.95)
        infos = await fill(backend, size, options.mib * MIB // size)
        names = [format_name(info.key) for info in infos]
        files = [folder / "objects" / name[:2] / name for name in names]
        for number in range(options.rounds):
            for who in ("ours", "fio") if number % 2 else ("fio", "ours"):
                if who == "fio":
                    row.theirs.append(await asyncio.to_thread(fio, files, size, options.threads))
                else:
                    row.ours.append(await load_all(backend, payloads(infos), DEPTH, options.batch))
            tick()
        await backend.delete([info.key for info in infos])
        await backend.aclose()
        rows.append(row)
    return rows


async def bench_dram(options: argparse.Namespace, tick: Callable[[], None]) -> list[Row]:
    """Against copying as much on as many threads: what lies in the tier into KV memory, as the
    restorer brings it there, lent and staged; and the backend's loads alone."""
    rows = []
    for size in SIZES:
        count = options.mib * MIB // size
        infos, tiers = await dram_tiers(size, count, options.copy_threads)
        source = StagingPool(count * size)
        target = StagingPool(DEPTH * options.batch * size)
        for pool in (source, target):
            pool.view[:] = bytes(len(pool.view))
        ways = dram_ways(size, options, infos, tiers, target)
        for threads in {1, options.copy_threads}:
            copy = partial(asyncio.to_thread, memcpy, source, target, size, count, threads)
            ways[f"memcpy x{threads}"] = (None, copy)
        for number in range(options.rounds):
            order = random.Random(number).sample(list(ways), len(ways))
            speeds = {name: await ways[name][1]() for name in order}
            for name, (row, _) in ways.items():
                if row is not None:
                    row.ours.append(speeds[name])
                    row.theirs.append(speeds[row.reference])
            tick()
        for tier in tiers.values():
            await tier.aclose()
        await asyncio.gather(source.aclose(), target.aclose())
        rows += [row for row, _ in ways.values() if row is not None]
    return rows


async def dram_tiers(
    size: int, count: int, threads: int
) -> tuple[dict[str, list[ChunkInfo]], dict[str, Tier]]:
    """A tier that lends and one that copies, each with ``count`` objects, and these objects."""
    infos, tiers = {}, {}
    for name, kind in (("lent", DramBackend), ("staged", Copying)):
        options = {"capacity_bytes": count * (size + 4096), "threads": threads}
        tiers[name] = await tier_over(await kind.open(options))
        infos[name] = await fill(tiers[name], size, count)
    return infos, tiers


def dram_ways(
    size: int,
    options: argparse.Namespace,
    infos: dict[str, list[ChunkInfo]],
    tiers: dict[str, Tier],
    target: StagingPool,
) -> Ways:
    """What is measured."""
    ways: Ways = {}
    for verified in (False, True):
        also = ", verified" if verified else ""
        for name, tier in tiers.items():
            goal = 0.85 if name == "lent" and not verified else None
            row = Row(f"dram into KV, {size // MIB} MiB, {name}{also}", "memcpy x1", goal)
            once = partial(
                into_memory,
                tier,
                infos[name],
                target,
                depth=DEPTH,
                batch=options.batch,
                threads=1,
                verify=verified,
            )
            ways[row.name] = (row, once)
        reference, goal = f"memcpy x{options.copy_threads}", None if verified else 0.85
        row = Row(f"dram load, {size // MIB} MiB{also}", reference, goal)
        backend = innermost(tiers["staged"])
        then = check if verified else None
        ranges = payloads(infos["staged"])
        ways[row.name] = (row, partial(load_all, backend, ranges, DEPTH, options.batch, then))
    return ways


def innermost(tier: Tier) -> StorageBackend:
    """The backend behind the guard."""
    assert isinstance(tier.inner, Guarded)
    return tier.inner.inner


def check(info: ChunkInfo, data: memoryview) -> None:
    """What a verifier does with one payload."""
    verify(info, info.key.layers, data)


async def bench_links(options: argparse.Namespace, tick: Callable[[], None]) -> list[Row]:
    """What throttled links deliver, in real time, against what they are set to."""
    rows = []
    inner = await DramBackend.open({"capacity_bytes": 9 * MIB})
    [info] = await fill(inner, 8 * MIB, 1)
    for unit, bandwidth in LINKS:
        row = Row(f"throttled {unit >> 10} KiB at {bandwidth / 1e6:.0f} MB/s", "nominal", 0.99)
        count = max(4, int(1.5 * bandwidth / unit))
        for _ in range(min(3, options.rounds)):
            backend = ThrottledBackend(inner, Link(bandwidth))
            row.ours.append(await load_all(backend, [(info, 4096, unit)] * count, 4))
            row.theirs.append(bandwidth)
        tick()
        rows.append(row)
    await inner.aclose()
    return rows


async def bench_lookup(folder: Path) -> dict[str, float]:
    """Milliseconds of looking up a prefix of 32 chunks: first after opening, then warm."""
    backend = await NvmeBackend.open({"path": str(folder), "fsync": False})
    infos = await fill(backend, 256 << 10, 32)
    await backend.aclose()
    backend = await NvmeBackend.open({"path": str(folder)})
    asked = [info.key.chunk for info in infos]
    times = []
    for _ in range(30):
        start = time.perf_counter()
        found = await backend.lookup(asked)
        times.append(1e3 * (time.perf_counter() - start))
        assert all(found)
    await asyncio.sleep(1.1)  # a listing is kept once its folder has been quiet for a second
    settled = []
    for _ in range(30):
        start = time.perf_counter()
        await backend.lookup(asked)
        settled.append(1e3 * (time.perf_counter() - start))
    await backend.aclose()
    return {"first_ms": times[0], "warm_ms": statistics.median(settled), "worst_ms": max(settled)}


def bench_keys() -> list[dict[str, float]]:
    """Keys of prompts, in one go and in the pieces in which a session makes them: milliseconds in
    all, and the longest that the event loop is held up."""
    root, chance, rows = key_root({"model": "bench"}), random.Random(0), []
    for length in KEY_TOKENS:
        tokens = [chance.randrange(50_000) for _ in range(length)]
        whole, total, longest = [], [], []
        for _ in range(15):
            start = time.perf_counter()
            chunk_keys(root, tokens, 256)
            whole.append(time.perf_counter() - start)
            keys: list[ChunkKey] = []
            pieces, done = [], False
            while not done:
                start = time.perf_counter()
                done = extend_keys(keys, root, tokens, 256, limit=TOKENS_IN_ONE_GO)
                pieces.append(time.perf_counter() - start)
            total.append(sum(pieces))
            longest.append(max(pieces))
        figures = {"in_one_go_ms": whole, "in_pieces_ms": total, "longest_piece_ms": longest}
        medians = {name: 1e3 * statistics.median(times) for name, times in figures.items()}
        rows.append({"tokens": length, **medians})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    result = Table(title="storage: GB/s, medians; ratio with its spread over the rounds")
    result.add_column("what")
    for name in ("GB/s", "reference", "GB/s", "ratio", "min - max", "target"):
        result.add_column(name, justify="right")
    for row in rows:
        target = f">= {row['target']}" if row["target"] else ""
        result.add_row(
            row["name"],
            f"{row['bytes_per_second'] / 1e9:.3f}",
            row["reference"],
            f"{row['reference_bytes_per_second'] / 1e9:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_min']:.3f} - {row['ratio_max']:.3f}",
            target,
        )
    return result


async def main(options: argparse.Namespace) -> None:
    """Run what is asked for and print it."""
    rows: list[Row] = []
    lookup: dict[str, float] = {}
    keys: list[dict[str, float]] = []
    steps = {"lookup": 1, "keys": 1, "dram": 2 * options.rounds, "links": len(LINKS)}
    steps["nvme"] = 2 * options.rounds
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as base,
        Progress(console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("", total=sum(steps[name] for name in options.only))
        for name in options.only:
            bar.update(task, description=name)
            match name:
                case "lookup":
                    lookup = await bench_lookup(Path(base) / "lookup")
                    bar.advance(task)
                case "keys":
                    keys = await asyncio.to_thread(bench_keys)
                    bar.advance(task)
                case "dram":
                    rows += await bench_dram(options, lambda: bar.advance(task))
                case "links":
                    rows += await bench_links(options, lambda: bar.advance(task))
                case "nvme":
                    if not shutil.which("fio"):
                        raise SystemExit("fio is not installed: apt-get install fio, or --only ...")
                    rows += await bench_nvme(
                        Path(base) / "nvme", options, lambda: bar.advance(task)
                    )
    summaries = [row.summary() for row in rows]
    if options.json:
        print(json.dumps({"rows": summaries, "lookup_of_32_chunks": lookup, "keys": keys}))
        return
    if rows:
        Console().print(table(summaries))
    if lookup:
        text = ", ".join(f"{name.removesuffix('_ms')} {ms:.2f} ms" for name, ms in lookup.items())
        print(f"lookup of 32 chunks: {text} (target: warm under 5 ms)")
    for row in keys:
        print(
            f"keys of {row['tokens']:,} tokens: {row['in_one_go_ms']:.1f} ms in one go, "
            f"{row['in_pieces_ms']:.1f} ms in pieces, of which the longest "
            f"{row['longest_piece_ms']:.2f} ms (target: under 5 ms)"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=512, help="bytes read in each round, in MiB")
    parser.add_argument("--threads", type=int, default=4, help="nvme threads, and jobs of fio")
    parser.add_argument("--copy-threads", type=int, default=2, help="dram threads, and of memcpy")
    parser.add_argument("--batch", type=int, default=4, help="reads in one load")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parts = ["lookup", "keys", "dram", "links", "nvme"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))

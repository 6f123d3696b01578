"""Storage backends against the bare machine, in one run and interleaved.

nvme reads against fio (psync, O_DIRECT, the very same files, as many jobs as the backend has
threads), a dram tier against memcpy on as many threads (with and without verifying checksums),
throttled links against what they are set to, warm lookups of a prefix, and how long making a
prompt's keys holds up the event loop. Medians of rounds, with the quartiles of the paired ratios.

"dram into KV" is the whole way from the tier into a real engine's KV pages, as the restorer goes
it, with the engine's one copy thread: lent bytes are copied once, from where they are stored
(reading them costs nothing by itself); staged ones are copied out of the tier first, as by backends
that do not lend. "dram load" is that first copy alone, on the backend's threads.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from storage_dram import bench_dram
from storage_reading import DEPTH, MIB, SIZES, Row, fill, load_all, payloads
from storage_reference import fio

from cacheflow.kv import chunk_keys, extend_keys, format_name, key_root
from cacheflow.session import TOKENS_IN_ONE_GO
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import ChunkKey


KEY_TOKENS = (8_192, 32_768, 131_072)
"""Prompt lengths whose keys are made."""
_DISK_ROUNDS = 3
"""Times as many rounds for disks: from one second to the next a virtual one is twice as fast."""
LINKS = ((100 << 10, 2e6), (100 << 10, 200e6), (MIB, 25e6), (8 * MIB, 200e6))
"""Unit of reading and bandwidth."""


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
        for number in range(_DISK_ROUNDS * options.rounds):
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
    for name in ("GB/s", "reference", "GB/s", "ratio", "quartiles", "target"):
        result.add_column(name, justify="right")
    for row in rows:
        target = f">= {row['target']}" if row["target"] else ""
        result.add_row(
            row["name"],
            f"{row['bytes_per_second'] / 1e9:.3f}",
            row["reference"],
            f"{row['reference_bytes_per_second'] / 1e9:.3f}",
            f"{row['ratio']:.3f}",
            " - ".join(f"{quartile:.3f}" for quartile in row["ratio_quartiles"]),
            target,
        )
    return result


async def main(options: argparse.Namespace) -> None:
    """Run what is asked for and print it."""
    rows: list[Row] = []
    lookup: dict[str, float] = {}
    keys: list[dict[str, float]] = []
    steps = {"lookup": 1, "keys": 1, "dram": 2 * options.rounds, "links": len(LINKS)}
    steps["nvme"] = 2 * _DISK_ROUNDS * options.rounds
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

"""The NIXL transport against a bare NIXL loop: throughput, lag of the event loop, CPU when idle.

One store process, of which all read the same objects; 4 reads of 4 MiB under way. The bare loop is
what an asyncio program has to do at least: four tasks, a thread that begins their transfers and
looks after them without pause, futures. (``thread`` is such a thread with nobody to tell: what the
transport can do.) Ours goes through the link and the reactor, from four tasks (``link``), or
through the whole backend with its lookups and leases (``pool``). Rounds alternate, so that all see
the same machine; ratios are those within a round. An event loop beside them is asked every
millisecond whether it is late. With ``--apart`` the event loop has a core to itself, and so have
the threads that move the bytes, in all ways: on two cores a kernel wakes the loop where the
copying one is, though the other core is idle, and what the loop does takes the copying's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop
from bench_pool import OBJECTS, store_object
from nixl_ways import DEPTH, SIZE, Asked, Bare, Linked, Pooled, Reader, opened
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.storage_backends.nixl import NixlTransport
from cacheflow.storage_backends.nixl.agent import why_missing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

WAYS: Final = ("thread", "bare", "link", "pool")
LINGER: Final = 2.0
"""Seconds for what was to be done after the last read."""
TARGETS: Final = {"ratio": 0.90, "lag_ms": 1.0, "idle_client": 0.01, "idle_store": 0.03}
_CORES: Final = os.sched_getaffinity(0)
"""On which the bench was begun."""


@dataclass(slots=True)
class Side:
    """Figures of one of the two, round by round."""

    rates: list[float] = field(default_factory=list)
    """Bytes a second."""
    lags: list[float] = field(default_factory=list)
    """Seconds that the event loop was late, all rounds together."""
    busy: list[float] = field(default_factory=list)
    """Cores that this process took."""


@asynccontextmanager
async def lag_into(lags: list[float]) -> AsyncIterator[None]:
    """Note every millisecond by how much the loop is late."""

    async def watch() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - due)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def set_apart(is_wanted: bool) -> set[int]:
    """Give the event loop, whose thread calls, one core, and those of NIXL's agents another; the
    cores of these."""
    first, *others = sorted(_CORES)
    if not (is_wanted and others):
        return _CORES
    os.sched_setaffinity(0, {first})
    for thread in threading.enumerate():
        if thread.name == "cacheflow-nixl" and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, others[:1])
    return set(others[:1])


async def timed(side: Side, count: int, run: Callable[[int], Any]) -> None:
    """One round of ``count`` reads."""
    async with lag_into(side.lags):
        start, cpu = time.perf_counter(), time.process_time()
        await run(count)
        seconds = time.perf_counter() - start
    side.rates.append(count * SIZE / seconds)
    side.busy.append((time.process_time() - cpu) / seconds)


async def idle(pid: int, seconds: float) -> tuple[float, float]:
    """Cores that we and the store take while nothing is under way."""
    await asyncio.sleep(LINGER)
    start = time.perf_counter()
    ours, theirs = time.process_time(), seconds_of(pid)
    await asyncio.sleep(seconds)
    passed = time.perf_counter() - start
    return (time.process_time() - ours) / passed, (seconds_of(pid) - theirs) / passed


def seconds_of(pid: int) -> float:
    """Of processors that all threads of a process have taken so far, in nanoseconds' resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text("ascii").split()[0]) for task in tasks) / 1e9


async def bench(
    transports: str, options: argparse.Namespace, folder: Path, done: Callable[[], None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All of one setting of UCX_TLS, in this process and in the store's: rows, and cores idle."""
    os.environ["UCX_TLS"] = transports
    sides = {name: Side() for name in WAYS}
    async with opened(folder) as (store, backend):
        infos = [await store_object(backend, number) for number in range(OBJECTS)]
        async with Reader.connected(store.port, infos) as reader:
            pooled = Pooled(backend, infos)
            transport = await NixlTransport.open()
            link = await transport.connect("store", "", reader.answer)
            linked = Linked(reader, transport, link)
            bare = await asyncio.to_thread(Bare, reader, set_apart(options.apart))

            async def run_thread(count: int) -> None:
                await asyncio.to_thread(bare.run, count)

            ways = (run_thread, Asked(bare).run, linked.run, pooled.run)
            runs = dict(zip(WAYS, ways, strict=True))
            async with reader.leasing():
                for run in runs.values():
                    await run(1)
                if len({way.first() for way in (bare, linked, pooled)}) > 1:
                    raise SystemExit("the three ways do not read the same bytes")
                for run in runs.values():
                    await timed(Side(), 2 * DEPTH, run)
                for number in range(options.rounds):
                    first = number % len(WAYS)
                    for name in WAYS[first:] + WAYS[:first]:
                        await timed(sides[name], options.reads, runs[name])
                    done()
            pooled.forget()
            client, idle_store = await idle(store.pid, options.idle)
            async with reader.leasing():
                _, leased = await idle(store.pid, options.idle)
            await transport.aclose()
    rows = [summary(f"{name}, {transports}", sides["bare"], sides[name]) for name in runs]
    return rows, {"client": client, "store": idle_store, "leased": leased}


def summary(name: str, bare: Side, side: Side) -> dict[str, Any]:
    """Medians, and the spread of the ratios within rounds."""
    ratios = [mine / theirs for mine, theirs in zip(side.rates, bare.rates, strict=True)]
    return {
        "name": name,
        "bytes_per_second": statistics.median(side.rates),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "lag_p99_ms": p99(side.lags),
        "bytes_per_core_second": per_core(side),
        "rounds": len(ratios),
    }


def per_core(side: Side) -> float:
    """Bytes for a second of a core of this process: says what the machine's other load hides."""
    return statistics.median(rate / busy for rate, busy in zip(side.rates, side.busy, strict=True))


def p99(seconds: list[float]) -> float:
    """In milliseconds."""
    return sorted(seconds)[int(0.99 * len(seconds))] * 1e3


def show(rows: list[dict[str, Any]], idles: dict[str, dict[str, float]]) -> None:
    """For people."""
    table = Table(title=f"{DEPTH} reads of {SIZE >> 20} MiB at a time, medians")
    for name in ("", "GB/s", "of bare", "min - max", "lag p99", "GB/core s"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['bytes_per_second'] / 1e9:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}",
            f"{row['lag_p99_ms']:.1f} ms",
            f"{row['bytes_per_core_second'] / 1e9:.2f}",
        )
    Console().print(table)
    for transports, cores in idles.items():
        print(
            f"{transports}: cores taken when idle: client {cores['client']:.2%}, store "
            f"{cores['store']:.2%}, store with a lease that nobody uses {cores['leased']:.2%}"
        )
    print(
        f"targets: link >= {TARGETS['ratio']} of bare, lag p99 <= bare + {TARGETS['lag_ms']:g} ms, "
        f"idle client < {TARGETS['idle_client']:.0%}, idle store < {TARGETS['idle_store']:.0%}"
    )


async def main(options: argparse.Namespace) -> None:
    """Run what is asked for and print it."""
    if (reason := why_missing()) is not None:
        raise SystemExit(reason)
    rows, idles = [], {}
    with Progress(console=Console(stderr=True)) as bar, tempfile.TemporaryDirectory() as folder:
        task = bar.add_task("", total=len(options.only) * options.rounds)
        for transports in options.only:
            bar.update(task, description=transports)
            found, idles[transports] = await bench(
                transports, options, Path(folder), lambda: bar.advance(task)
            )
            rows += found
    if options.json:
        print(json.dumps({"rows": rows, "idle_cores": idles, "targets": TARGETS}))
    else:
        show(rows, idles)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reads", type=int, default=100, help="in each round")
    parser.add_argument("--idle", type=float, default=3.0, help="seconds of doing nothing")
    parser.add_argument("--only", nargs="+", default=["tcp", "all"], help="values of UCX_TLS")
    parser.add_argument("--apart", action="store_true", help="loop and copies on a core each")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))

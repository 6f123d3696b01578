"""The NIXL transport against a bare NIXL loop: throughput, lag of the event loop, CPU when idle.

A store process with nothing but registered memory; 4 reads of 4 MiB under way. The bare loop is a
thread that does nothing but begin transfers and look after them, without pause; ours goes through
the link and the reactor, from four tasks (``link``), or through the whole backend with its lookups
and leases, from a store (``pool``). Rounds alternate, so that all see the same machine; ratios are
those within a round. An event loop beside them is asked every millisecond whether it is late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import uvloop
from bench_pool import OBJECTS, store_object
from nixl_store import running_store
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.memory import StagingPool
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl import NixlTransport
from cacheflow.storage_backends.nixl.agent import UcxAgent, why_missing
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import MemoryKind, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nixl_store import BareStore

    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.types import ChunkInfo

SIZE: Final = 4 << 20
DEPTH: Final = 4
ARENA: Final = 64 << 20
TARGETS: Final = {"ratio": 0.90, "lag_ms": 1.0, "idle_client": 0.01, "idle_store": 0.03}


@dataclass(slots=True)
class Side:
    """Figures of one of the two, round by round."""

    rates: list[float] = field(default_factory=list)
    """Bytes a second."""
    lags: list[float] = field(default_factory=list)
    """Seconds that the event loop was late, all rounds together."""
    busy: list[float] = field(default_factory=list)
    """Cores that this process took."""


class Bare:
    """Transfers of an agent of its own, on whatever thread :meth:`run` is called."""

    def __init__(self, answer: bytes) -> None:
        self._hello = Hello.decode(answer)
        self._agent = UcxAgent(f"bare-{time.time_ns()}")
        self._pool = StagingPool(DEPTH * SIZE)
        self._agent.register(self._pool.address, self._pool.capacity, self._pool.kind)
        self._peer = self._agent.add(self._hello.metadata)

    def run(self, count: int) -> None:
        """Read ``count`` times."""
        agent, begun = self._agent, min(DEPTH, count)
        flying = [(slot, self._begin(slot, slot)) for slot in range(begun)]
        while flying:
            still = []
            for slot, transfer in flying:
                if not agent.has_ended(transfer):
                    still.append((slot, transfer))
                    continue
                agent.release(transfer)
                if begun < count:
                    still.append((slot, self._begin(slot, begun)))
                    begun += 1
            flying = still

    def _begin(self, slot: int, number: int) -> object:
        ours = [(self._pool.address + slot * SIZE, SIZE)]
        theirs = [(self._hello.address + number * SIZE % ARENA, SIZE)]
        return self._agent.begin("READ", self._peer, ours, MemoryKind.PAGEABLE, theirs)


class Ours:
    """The same transfers through a link, from as many tasks, into registered staging memory."""

    def __init__(self, transport: NixlTransport, link: NixlLink) -> None:
        self._link = link
        self._pool = StagingPool(DEPTH * SIZE)
        transport.register_memory(self._pool.arena)

    async def run(self, count: int) -> None:
        """Read ``count`` times; what arrived last is checked."""
        numbers = iter(range(count))

        async def one() -> None:
            with await self._pool.lease(SIZE) as lease:
                for number in numbers:
                    offset = number * SIZE % ARENA
                    await self._link.read([Piece(offset, 0, lease.buffer)], deadline=60)
                if bytes(lease.view[:8]) != (offset >> 16).to_bytes(8, "little"):
                    raise SystemExit("wrong bytes")

        async with asyncio.TaskGroup() as group:
            for _ in range(DEPTH):
                group.create_task(one())


class Pooled:
    """Reads of 4 MiB through the pool backend, into the same kind of memory."""

    def __init__(self, backend: PoolBackend, infos: list[ChunkInfo]) -> None:
        self._backend = backend
        self._infos = infos
        self._pool = StagingPool(DEPTH * SIZE)
        backend.register_memory(self._pool.arena)

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path) -> AsyncIterator[Self]:
        """On a store of its own, with all objects in it."""
        arena = (OBJECTS + 4) * (SIZE + (1 << 16))
        process = StoreProcess(folder / "log", arena=arena, transports='["nixl"]')
        await asyncio.to_thread(process.start)
        try:
            options = {"peers": [process.address], "transports": ["nixl"]}
            backend = await PoolBackend.open(options)
            try:
                yield cls(backend, [await store_object(backend, n) for n in range(OBJECTS)])
            finally:
                await backend.aclose()
        finally:
            await asyncio.to_thread(process.kill)

    async def run(self, count: int) -> None:
        """Look all objects up once, then read ``count`` times."""
        assert all(await self._backend.lookup([info.key.chunk for info in self._infos]))
        numbers = iter(range(count))

        async def one() -> None:
            with await self._pool.lease(SIZE) as lease:
                for number in numbers:
                    info = self._infos[number % OBJECTS]
                    read = Read(info.key, info.payload_offset, lease.buffer)
                    async for result in self._backend.load([read]):
                        assert result.status is TransferStatus.OK, result

        async with asyncio.TaskGroup() as group:
            for _ in range(DEPTH):
                group.create_task(one())


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


async def timed(side: Side, count: int, run: Callable[[int], Any]) -> None:
    """One round of ``count`` reads."""
    async with lag_into(side.lags):
        start, cpu = time.perf_counter(), time.process_time()
        await run(count)
        seconds = time.perf_counter() - start
    side.rates.append(count * SIZE / seconds)
    side.busy.append((time.process_time() - cpu) / seconds)


async def idle(store: BareStore, seconds: float, leases: int) -> tuple[float, float]:
    """Cores that we and the store take while nothing is under way, with so many leases."""
    await store.order("busy", leases)
    ours, theirs = time.process_time(), float(await store.order("cpu"))
    await asyncio.sleep(seconds)
    took = float(await store.order("cpu")) - theirs
    await store.order("busy", 1)
    return (time.process_time() - ours) / seconds, took / seconds


async def bench(
    transports: str, options: argparse.Namespace, folder: Path, done: Callable[[], None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All of one setting of UCX_TLS, in this process and in the stores': rows, and cores idle."""
    os.environ["UCX_TLS"] = transports
    sides = {name: Side() for name in ("bare", "link", "pool")}
    async with running_store(ARENA) as store, Pooled.opened(folder) as pooled:
        transport = await NixlTransport.open()
        ours = Ours(transport, await transport.connect("store", "", store.answer))
        bare = await asyncio.to_thread(Bare, store.answer)

        async def run_bare(count: int) -> None:
            await asyncio.to_thread(bare.run, count)

        runs = {"bare": run_bare, "link": ours.run, "pool": pooled.run}
        for run in runs.values():
            await timed(Side(), 2 * DEPTH, run)
        for number in range(options.rounds):
            for name in [*runs][number % 3 :] + [*runs][: number % 3]:
                # The store that is not read does not look for readers a thousand times a second.
                await store.order("busy", int(name != "pool"))
                await timed(sides[name], options.reads, runs[name])
            done()
        client, idle_store = await idle(store, options.idle, 0)
        _, leased = await idle(store, options.idle, 1)
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
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))

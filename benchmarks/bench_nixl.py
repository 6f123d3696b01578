"""The NIXL transport against a bare NIXL loop: throughput, lag of the event loop, CPU when idle.

A store process with nothing but registered memory; 4 reads of 4 MiB under way. The bare loop is a
thread that does nothing but begin transfers and look after them, without pause; ours goes through
the link and the reactor, from four tasks. Rounds alternate, so that both see the same machine; the
ratio is that of pairs. An event loop beside both is asked every millisecond whether it is late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import uvloop
from nixl_store import running_store
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.memory import StagingPool
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl import NixlTransport
from cacheflow.storage_backends.nixl.agent import UcxAgent, why_missing
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nixl_store import StoreProcess

    from cacheflow.storage_backends.nixl.link import NixlLink

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


async def idle(store: StoreProcess, seconds: float, leases: int) -> tuple[float, float]:
    """Cores that we and the store take while nothing is under way, with so many leases."""
    await store.order("busy", leases)
    ours, theirs = time.process_time(), float(await store.order("cpu"))
    await asyncio.sleep(seconds)
    took = float(await store.order("cpu")) - theirs
    await store.order("busy", 1)
    return (time.process_time() - ours) / seconds, took / seconds


async def bench(
    transports: str, options: argparse.Namespace, done: Callable[[], None]
) -> dict[str, Any]:
    """All of one setting of UCX_TLS, in this process and in the store's."""
    os.environ["UCX_TLS"] = transports
    bare_side, our_side = Side(), Side()
    async with running_store(ARENA) as store:
        transport = await NixlTransport.open()
        ours = Ours(transport, await transport.connect("store", "", store.answer))
        bare = await asyncio.to_thread(Bare, store.answer)

        async def run_bare(count: int) -> None:
            await asyncio.to_thread(bare.run, count)

        await timed(Side(), 2 * DEPTH, ours.run)
        await timed(Side(), 2 * DEPTH, run_bare)
        for number in range(options.rounds):
            pair = [(our_side, ours.run), (bare_side, run_bare)]
            for side, run in pair if number % 2 else reversed(pair):
                await timed(side, options.reads, run)
            done()
        client, idle_store = await idle(store, options.idle, 0)
        _, leased = await idle(store, options.idle, 1)
        await transport.aclose()
    return summary(transports, bare_side, our_side) | {
        "idle_client": client,
        "idle_store": idle_store,
        "leased_store": leased,
    }


def summary(transports: str, bare: Side, ours: Side) -> dict[str, Any]:
    """Medians, and the spread of the ratios of pairs."""
    ratios = [mine / theirs for mine, theirs in zip(ours.rates, bare.rates, strict=True)]
    return {
        "transports": transports,
        "bytes_per_second": statistics.median(ours.rates),
        "bare_bytes_per_second": statistics.median(bare.rates),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "lag_p99_ms": p99(ours.lags),
        "bare_lag_p99_ms": p99(bare.lags),
        "bytes_per_core_second": per_core(ours),
        "bare_bytes_per_core_second": per_core(bare),
        "rounds": len(ratios),
    }


def per_core(side: Side) -> float:
    """Bytes for a second of a core of this process: says what the machine's other load hides."""
    return statistics.median(rate / busy for rate, busy in zip(side.rates, side.busy, strict=True))


def p99(seconds: list[float]) -> float:
    """In milliseconds."""
    return sorted(seconds)[int(0.99 * len(seconds))] * 1e3


def show(rows: list[dict[str, Any]]) -> None:
    """For people."""
    table = Table(title=f"{DEPTH} reads of {SIZE >> 20} MiB at a time, medians")
    for name in (
        "UCX_TLS",
        "GB/s",
        "bare",
        "ratio",
        "min - max",
        "lag p99",
        "bare",
        "GB/core s",
        "bare",
    ):
        table.add_column(name, justify="right" if name != "UCX_TLS" else "left")
    for row in rows:
        table.add_row(
            row["transports"],
            f"{row['bytes_per_second'] / 1e9:.2f}",
            f"{row['bare_bytes_per_second'] / 1e9:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_min']:.2f} - {row['ratio_max']:.2f}",
            f"{row['lag_p99_ms']:.1f} ms",
            f"{row['bare_lag_p99_ms']:.1f} ms",
            f"{row['bytes_per_core_second'] / 1e9:.2f}",
            f"{row['bare_bytes_per_core_second'] / 1e9:.2f}",
        )
    Console().print(table)
    for row in rows:
        print(
            f"{row['transports']}: cores taken when idle: client {row['idle_client']:.2%}, store "
            f"{row['idle_store']:.2%}, store with a lease that nobody uses "
            f"{row['leased_store']:.2%}"
        )
    print(
        f"targets: ratio >= {TARGETS['ratio']}, lag p99 <= bare + {TARGETS['lag_ms']:g} ms, idle "
        f"client < {TARGETS['idle_client']:.0%}, idle store < {TARGETS['idle_store']:.0%}"
    )


async def main(options: argparse.Namespace) -> None:
    """Run what is asked for and print it."""
    if (reason := why_missing()) is not None:
        raise SystemExit(reason)
    rows = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(options.only) * options.rounds)
        for transports in options.only:
            bar.update(task, description=transports)
            rows.append(await bench(transports, options, lambda: bar.advance(task)))
    if options.json:
        print(json.dumps({"rows": rows, "targets": TARGETS}))
    else:
        show(rows)


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

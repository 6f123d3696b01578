"""The memory pool over tcp against bare sockets: throughput, event-loop lag, questions, idle CPU.

One store process on loopback, 4 loads of 4 MiB in flight, after one lookup (``pool``) or each with
a lease of its own (``pool, leasing``). Beside it, in the same run and in turns, a bare server's
blocks of the same size on as many connections: received on the event loop (``asyncio``), and by
blocking threads (``threads``), which is how the transport does it. Medians of rounds; ratios are of
pairs within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop
from pool_reference import asyncio_copy, running_reference, thread_copy
from rich.console import Console
from rich.table import Table

from cacheflow.kv import seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import ChunkKey, KVLayout, ObjectKey, Read, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cacheflow.types import Buffer, ChunkInfo

SIZE: Final = 4 << 20
DEPTH: Final = 4
OBJECTS: Final = 16
LAYOUT: Final = KVLayout(
    num_layers=8, num_kv_heads=8, head_dim=64, dtype="float16", chunk_tokens=256
)
"""4 MiB an object."""


async def main(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    arena = (OBJECTS + 4) * (SIZE + (1 << 16))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(StoreProcess(folder / "log", arena=arena))
        port = stack.enter_context(running_reference(SIZE))
        backend = await PoolBackend.open({"peers": [store.address], "transports": ["tcp"]})
        try:
            infos = [await store_object(backend, number) for number in range(OBJECTS)]
            rows = await _rounds(backend, infos, port, options)
            idle = await _idle(store.pid, options.idle)
            questions = await _questions(backend, infos, options.rounds)
        finally:
            await backend.aclose()
    return {"throughput": rows, "idle_cores": idle, "questions_ms": questions}


async def store_object(backend: PoolBackend, number: int) -> ChunkInfo:
    """One object of ``LAYOUT``, random bytes."""
    chance = random.Random(number)
    payload = bytearray(chance.randbytes(LAYOUT.payload_bytes()))
    key = ObjectKey(ChunkKey(chance.randbytes(32)), Span(0, 8), Span(0, 8))
    info, header = await asyncio.to_thread(
        lambda: seal(key, LAYOUT, memoryview(payload), grid_id="b", segments=(), canonical=True)
    )
    [result] = await backend.store([Write(info, (buffer_from(header), buffer_from(payload)))])
    assert result.status is TransferStatus.OK, result
    return info


async def _rounds(
    backend: PoolBackend, infos: list[ChunkInfo], port: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    pool = StagingPool(DEPTH * SIZE)
    leases = [await pool.lease(SIZE) for _ in range(DEPTH)]
    buffers, views = [lease.buffer for lease in leases], [lease.view for lease in leases]
    loop_sockets, thread_sockets = _connections(port), _connections(port)
    for each in loop_sockets:
        each.setblocking(False)
    threads = ThreadPoolExecutor(DEPTH)
    loop = asyncio.get_running_loop()
    count = options.blocks

    async def by_threads() -> None:
        jobs = [
            loop.run_in_executor(threads, thread_copy, connection, view, count)
            for connection, view in zip(thread_sockets, views, strict=True)
        ]
        await asyncio.gather(*jobs)

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "pool": lambda: _load(backend, infos, buffers, count),
        "pool, leasing": lambda: _load(backend, infos, buffers, count, looks_up=False),
        "asyncio": lambda: asyncio_copy(loop_sockets, views, count),
        "threads": by_threads,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    lags: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        order = list(ways)[number % 4 :] + list(ways)[: number % 4]
        for name in order:
            lag = _Lag()
            start = time.perf_counter()
            await ways[name]()
            seconds = time.perf_counter() - start
            late = lag.stop()
            if number:  # the first one warms up
                rates[name].append(DEPTH * count * SIZE / seconds)
                lags[name] += late
    for connection in (*loop_sockets, *thread_sockets):
        connection.close()
    threads.shutdown()
    for lease in leases:
        lease.release()
    await pool.aclose()
    return [_row(name, rates, lags) for name in ways]


def _connections(port: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(DEPTH)]


async def _load(
    backend: PoolBackend,
    infos: list[ChunkInfo],
    buffers: list[Buffer],
    count: int,
    *,
    looks_up: bool = True,
) -> None:
    for peer in backend.members.up:
        for info in infos:
            peer.places.forget(info.key)
    if looks_up:
        assert all(await backend.lookup([info.key.chunk for info in infos]))

    async def one(at: int, buffer: Buffer) -> None:
        for number in range(count):
            info = infos[(at + number) % OBJECTS]
            async for result in backend.load([Read(info.key, info.payload_offset, buffer)]):
                assert result.status is TransferStatus.OK, result

    await asyncio.gather(*(one(at, buffer) for at, buffer in enumerate(buffers)))


class _Lag:
    """Seconds by which a timer of 2 ms was late."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._task = asyncio.create_task(self._run())

    def stop(self) -> list[float]:
        self._task.cancel()
        return self._late

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            self._late.append(time.perf_counter() - due)


def _row(name: str, rates: dict[str, list[float]], lags: dict[str, list[float]]) -> dict[str, Any]:
    late = sorted(lags[name])
    return {
        "name": name,
        "bytes_per_second": statistics.median(rates[name]),
        "ratio_to_asyncio": _ratio(rates[name], rates["asyncio"]),
        "ratio_to_threads": _ratio(rates[name], rates["threads"]),
        "lag_p99_ms": 1e3 * late[int(0.99 * (len(late) - 1))] if late else 0.0,
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


async def _idle(pid: int, seconds: float) -> dict[str, float]:
    """Cores that client and store take while nobody wants anything."""
    start, ours, theirs = time.monotonic(), _cpu(os.getpid()), _cpu(pid)
    await asyncio.sleep(seconds)
    passed = time.monotonic() - start
    return {"client": (_cpu(os.getpid()) - ours) / passed, "store": (_cpu(pid) - theirs) / passed}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _questions(backend: PoolBackend, infos: list[ChunkInfo], rounds: int) -> dict[str, float]:
    """Milliseconds of a lookup whose headers are new, of one whose are known, and of a small
    read with its lease."""
    keys = [info.key.chunk for info in infos]
    buffer = buffer_from(bytearray(4096))
    fresh: list[float] = []
    known: list[float] = []
    small: list[float] = []
    for _ in range(10 * rounds):
        backend.looking._headers.clear()
        for times in (fresh, known):
            start = time.perf_counter()
            assert all(await backend.lookup(keys))
            times.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        [result] = [each async for each in backend.load([Read(infos[0].key, 0, buffer)])]
        assert result.status is TransferStatus.OK
        small.append(1e3 * (time.perf_counter() - start))
    names = {"lookup_16_new": fresh, "lookup_16_known": known, "read_4_kib": small}
    return {name: statistics.median(times) for name, times in names.items()}


def show(found: dict[str, Any]) -> None:
    """The figures for people."""
    table = Table(title=f"pool over tcp loopback: 4 MiB x {DEPTH}, medians")
    for name in ("way", "GB/s", "of asyncio", "of threads", "loop lag p99 ms"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in found["throughput"]:
        ratios = (row["ratio_to_asyncio"], row["ratio_to_threads"])
        table.add_row(
            row["name"],
            f"{row['bytes_per_second'] / 1e9:.2f}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{row['lag_p99_ms']:.2f}",
        )
    console = Console()
    console.print(table)
    idle = {name: f"{100 * cores:.2f} %" for name, cores in found["idle_cores"].items()}
    console.print(
        f"idle, of a core: client {idle['client']} (< 1 %), store {idle['store']} (< 3 %)"
    )
    console.print(", ".join(f"{name} {ms:.2f} ms" for name, ms in found["questions_ms"].items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=24, help="4 MiB blocks a lane and round")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = uvloop.run(main(arguments))
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)

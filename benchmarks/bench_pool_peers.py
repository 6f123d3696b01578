"""Requests over a pool of three stores while a fourth one joins and one of the first is killed.

A real engine with a small random model, store processes that are found through a real etcd, and one
client that is never told anything. Several sessions ask all the while, half of their requests load
whatever they can and all of them store; every one has to complete with the tokens of a cold run.
What moves between stores is looked up in the client's own placement: of many made-up keys, against
the share of one store, and of those that the requests use.

    make bench-pool-peers
    UCX_TLS=all make bench-pool-peers ARGS="--transport nixl"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console
from rich.table import Table
from rigs import model_options, opened

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.testing.etcd_server import find_etcd, running_etcd
from cacheflow.testing.store_process import StoreProcess
from cacheflow.tiers import Guarded
from cacheflow.types import LoadEnded, LoadOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import Engine
    from cacheflow.storage_backends.pool.placement import Placement
    from cacheflow.types import Event

STORES: Final = 3
SESSIONS: Final = 3
PHASES: Final = ("three stores", "a fourth joins", "one is killed")
TOLERANCE: Final = 0.05
"""Of the ideal share: by how much what moves may differ from it."""
_DIGESTS: Final = [random.Random(seed).randbytes(32) for seed in range(50_000)]
_PROMPTS: Final = 6
_LIMIT: Final = 60.0


@dataclass(slots=True)
class Phase:
    """What became of the requests that began in it."""

    name: str
    requests: int = 0
    wrong_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    loads: int = 0
    """That were published."""
    corrupt: int = 0
    loaded_share: float = 0.0
    """Of the tokens that requests of the policy ``load`` asked for."""
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """What another list of stores changes: shares of all keys."""

    what: str
    moved: float
    ideal: float
    strays: int
    """Keys that moved though neither their old nor their new store is the one that came or went."""
    moved_in_use: int
    """Of the chunks that the requests use."""
    in_use: int

    @property
    def is_even(self) -> bool:
        return abs(self.moved / self.ideal - 1) <= TOLERANCE and not self.strays


@dataclass(slots=True)
class Found:
    """All there is to say."""

    phases: list[Phase]
    moves: list[Move] = field(default_factory=list)


class Campaign:
    """``requests`` in all, a third in each phase; prompts have ``tokens`` each."""

    def __init__(
        self, engine: Engine, folder: Path, requests: int, tokens: int, transport: str = "tcp"
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._transport = transport
        self._each = max(SESSIONS, requests // len(PHASES))
        chance = random.Random(requests)
        self._prompts = [[chance.randrange(300) for _ in range(tokens)] for _ in range(_PROMPTS)]
        self._cold: list[list[int]] = []
        self._found = Found([])
        self._asked = self._loaded = 0
        self._ended = asyncio.Event()
        """A request of this phase has."""

    async def run(self) -> Found:
        """All phases; requests go on from one into the next."""
        async with AsyncExitStack() as stack:
            running_one = running_etcd(self._folder)
            etcd = await asyncio.to_thread(running_one.__enter__)
            stack.push_async_callback(asyncio.to_thread, running_one.__exit__, None, None, None)
            stores = [self._store(number, etcd) for number in range(STORES + 1)]
            for store in stores:
                stack.push_async_callback(asyncio.to_thread, store.kill)
            await asyncio.gather(*(asyncio.to_thread(each.start) for each in stores[:STORES]))
            flow = await stack.enter_async_context(
                CacheFlow.open(self._settings(etcd), engine=self._engine, observer=self._hear)
            )
            guarded = flow.backends["pool"]
            assert isinstance(guarded, Guarded)
            assert isinstance(guarded.inner, PoolBackend)
            await self._campaign(flow, guarded.inner, stores)
        return self._found

    def _store(self, number: int, etcd: str) -> StoreProcess:
        transports = json.dumps([self._transport])
        options = {"arena": "64MiB", "etcd": etcd, "etcd_ttl": 1, "transports": transports}
        store = StoreProcess(self._folder / f"log{number}", **options)
        store.options["advertise"] = store.address
        return store

    def _settings(self, etcd: str) -> Settings:
        options = {
            "etcd": etcd,
            "discovery_seconds": 0.1,
            "transports": [self._transport],
            "request_seconds": 0.5,
            "transfer_seconds": 2.0,
            "connect_seconds": 2.0,
        }
        tier = {"name": "pool", "backend": "pool", "options": options}
        return Settings(tiers=[tier], staging_bytes=1 << 24, load_deadline=2.0)

    async def _campaign(
        self, flow: CacheFlow, pool: PoolBackend, stores: Sequence[StoreProcess]
    ) -> None:
        await _peers_are(pool, STORES)
        for prompt in self._prompts:
            self._cold.append(await _ask(flow, prompt, "recompute", Generation()))
        await flow.flush()
        stop = asyncio.Event()
        self._begin(PHASES[0])
        async with asyncio.TaskGroup() as group:
            for number in range(SESSIONS):
                group.create_task(self._client(flow, number, stop))
            try:
                await self._until_asked()
                placements = [pool.members.placement]
                self._begin(PHASES[1])
                await asyncio.to_thread(stores[STORES].start)
                await _peers_are(pool, STORES + 1)
                placements.append(pool.members.placement)
                await self._until_asked()
                self._begin(PHASES[2])
                await asyncio.to_thread(stores[0].kill)
                await _peers_are(pool, STORES)
                placements.append(pool.members.placement)
                await self._until_asked()
            finally:
                stop.set()
        self._close_phase()
        used = [key.digest for prompt in self._prompts for key in flow.keys(prompt)]
        names = ("one joins", stores[STORES].address), ("one is killed", stores[0].address)
        for (what, store), (old, new) in zip(names, pairwise(placements), strict=True):
            self._found.moves.append(move_of(what, store, old, new, used))

    # -- requests ------------------------------------------------------------------------------

    async def _client(self, flow: CacheFlow, number: int, stop: asyncio.Event) -> None:
        for turn in count():
            if stop.is_set():
                return
            policy = "load" if (number + turn) % 2 else "adaptive"
            await self._request(flow, (2 * number + turn) % _PROMPTS, policy)

    async def _request(self, flow: CacheFlow, at: int, policy: str) -> None:
        phase, report = self._found.phases[-1], Generation()
        start = time.monotonic()
        try:
            tokens = await _ask(flow, self._prompts[at], policy, report)
        except Exception as error:  # a bench: whatever a request dies of is what it is to show
            phase.errors.append(f"{type(error).__name__}: {error}")
        else:
            phase.wrong_tokens += tokens != self._cold[at]
        phase.longest_s = max(phase.longest_s, time.monotonic() - start)
        phase.requests += 1
        if policy == "load" and phase is self._found.phases[-1]:
            self._asked += len(self._prompts[at])
            self._loaded += report.usage.loaded_tokens
        self._ended.set()

    def _hear(self, event: Event) -> None:
        if isinstance(event, LoadEnded) and self._found.phases:
            phase = self._found.phases[-1]
            phase.loads += event.outcome is LoadOutcome.PUBLISHED
            phase.corrupt += event.outcome is LoadOutcome.CORRUPT

    # -- phases --------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        if self._found.phases:
            self._close_phase()
        self._found.phases.append(Phase(name))

    def _close_phase(self) -> None:
        if self._asked:
            self._found.phases[-1].loaded_share = self._loaded / self._asked
        self._asked = self._loaded = 0

    async def _until_asked(self) -> None:
        """So many more requests have ended."""
        phase = self._found.phases[-1]
        enough = phase.requests + self._each
        while phase.requests < enough:
            self._ended.clear()
            await self._ended.wait()


def move_of(what: str, store: str, old: Placement, new: Placement, used: Sequence[bytes]) -> Move:
    """``store`` came or went; ``used``: digests of the chunks in use."""

    def moved_of(digests: Sequence[bytes]) -> list[tuple[str, str]]:
        pairs = [(old.of(digest)[0], new.of(digest)[0]) for digest in digests]
        return [pair for pair in pairs if pair[0] != pair[1]]

    moved = moved_of(_DIGESTS)
    ideal = 1 / max(len(old.names), len(new.names))
    strays = sum(store not in pair for pair in moved)
    return Move(what, len(moved) / len(_DIGESTS), ideal, strays, len(moved_of(used)), len(used))


async def _ask(
    flow: CacheFlow, prompt: Sequence[int], policy: str, report: Generation
) -> list[int]:
    session = flow.session()
    stream = session.generate(prompt, max_new_tokens=3, policy=policy, save=True, report=report)
    try:
        return [token async for token in stream]
    finally:
        await session.forget()


async def _peers_are(pool: PoolBackend, count: int) -> None:
    """So many stores are known to the client, and up."""
    async with asyncio.timeout(_LIMIT):
        while [each.is_up for each in pool.members.peers.values()] != [True] * count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def wrong(found: Found) -> list[str]:
    """What must not be."""
    problems = []
    for phase in found.phases:
        if phase.errors or phase.wrong_tokens or phase.corrupt:
            problems.append(
                f"{phase.name}: {phase.errors or 'no'} errors, {phase.wrong_tokens} with wrong "
                f"tokens, {phase.corrupt} corrupt loads"
            )
        if not phase.loads:
            problems.append(f"{phase.name}: nothing was loaded")
    return problems + [
        f"{move.what}: {move.moved:.2%} of the keys moved, {move.strays} of them for nothing; "
        f"{move.ideal:.2%} is the share of a store"
        for move in found.moves
        if not move.is_even
    ]


def show(found: Found) -> None:
    """The phases and moves for people."""
    table = Table(title="requests over a pool whose stores come and go")
    names = ("phase", "requests", "errors", "wrong", "loads", "corrupt", "loaded", "longest s")
    for name in names:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in found.phases:
        counts = (phase.requests, len(phase.errors), phase.wrong_tokens, phase.loads, phase.corrupt)
        table.add_row(
            phase.name, *map(str, counts), f"{phase.loaded_share:.0%}", f"{phase.longest_s:.2f}"
        )
    Console().print(table)
    for move in found.moves:
        print(
            f"{move.what}: {move.moved:.2%} of {len(_DIGESTS)} keys moved, {move.strays} of them "
            f"between other stores ({move.moved / move.ideal:.3f} of the ideal {move.ideal:.0%}); "
            f"of those in use {move.moved_in_use} of {move.in_use}"
        )


async def main(options: argparse.Namespace) -> Found:
    """The campaign on a model of the rig."""
    async with opened(options) as rig:
        with tempfile.TemporaryDirectory() as folder:
            counts = (options.requests, options.tokens, options.transport)
            return await Campaign(rig.engine, Path(folder), *counts).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--transport", default="tcp", help="nixl: with UCX_TLS set, or on RDMA")
    arguments = parser.parse_args()
    logging.getLogger("cacheflow").setLevel(logging.ERROR)
    if find_etcd() is None:
        raise SystemExit("no etcd here: apt-get install etcd-server")
    result = uvloop.run(main(arguments))
    if arguments.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        show(result)
    if problems := wrong(result):
        raise SystemExit("; ".join(problems))

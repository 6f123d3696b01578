"""Restores over a pool whose store is killed, stopped, cut off and black-holed all the while.

A real engine with a small random model, a store process behind a proxy, and one client that is
never restarted. Requests come one after another, half of them loading whatever they can; every one
has to complete with the tokens of a cold run, no load may fail its checksum, and after each fault
the store has to be used again by itself.

    make bench-pool-faults
    UCX_TLS=all make bench-pool-faults ARGS="--transport nixl"
    sudo UCX_TLS=tcp make bench-pool-faults ARGS="--transport nixl --namespace"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop
from rich.console import Console
from rich.table import Table
from rigs import model_options, opened

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.net_namespace import NetNamespace, why_no_namespace
from cacheflow.testing.store_process import StoreProcess
from cacheflow.testing.tcp_proxy import TcpProxy
from cacheflow.types import LoadEnded, LoadOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import Engine
    from cacheflow.types import Event

FAULTS: Final = ("kill", "stop", "cut", "black hole")
IN_NAMESPACE: Final = ("kill", "stop", "unplugged")
_TOKEN: Final = "a token for the store of the bench"
_BEHIND: Final = "127.0.0.2"
"""Where the store listens; clients know the proxy, which has the same ports."""
_LIMIT: Final = 30.0


@dataclass(slots=True)
class Phase:
    """What was seen while one fault was there and after it."""

    fault: str
    restores: int = 0
    wrong_tokens: int = 0
    loaded: int = 0
    """Loads that were published."""
    corrupt: int = 0
    longest_s: float = 0.0
    recovered_s: float = 0.0
    """From the end of the fault until a request loaded again."""


@dataclass(slots=True)
class Watch:
    """Counts loads by how they ended."""

    outcomes: dict[LoadOutcome, int] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, LoadEnded):
            self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1

    @property
    def published(self) -> int:
        return self.outcomes.get(LoadOutcome.PUBLISHED, 0)

    @property
    def corrupt(self) -> int:
        return self.outcomes.get(LoadOutcome.CORRUPT, 0)


class Campaign:
    """``restores`` in all, spread over the faults; prompts have ``tokens`` each.

    Over transport ``nixl`` bytes go round the proxy: of what is cut, only the side channel is. With
    a ``namespace`` the store is in there instead, and nothing goes round its cable.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        restores: int,
        tokens: int,
        transport: str = "tcp",
        *,
        namespace: bool = False,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._transport = transport
        self._faults = IN_NAMESPACE if namespace else FAULTS
        self._each = max(1, restores // (2 * len(self._faults)))
        chance = random.Random(restores)
        self._prompts = [[chance.randrange(300) for _ in range(tokens)] for _ in range(3)]
        self._cold: list[list[int]] = []
        self._watch = Watch()

    async def run(self) -> list[Phase]:
        """All faults, one after another, on one client."""
        token = self._folder / "token"
        await asyncio.to_thread(token.write_text, _TOKEN)
        with ExitStack() as stack:
            try:
                store, network, address = await asyncio.to_thread(self._place, stack)
                settings = self._settings(address, token)
                opened = CacheFlow.open(settings, engine=self._engine, observer=self._watch)
                async with opened as flow:
                    for prompt in self._prompts:
                        self._cold.append(await self._ask(flow, prompt, "recompute", save=True))
                    return [
                        await self._phase(flow, fault, store, network) for fault in self._faults
                    ]
            finally:
                await asyncio.to_thread(stack.close)

    def _place(self, stack: ExitStack) -> tuple[StoreProcess, TcpProxy | NetNamespace, str]:
        """A store behind a network that can be cut, and the address that it has for clients."""
        network: TcpProxy | NetNamespace
        if self._faults is IN_NAMESPACE:
            network = stack.enter_context(NetNamespace("f"))
            store = self._store(network.address)
            store.prefix = network.command
            stack.enter_context(store)
            return store, network, f"{network.address}:{store.port}"
        store = stack.enter_context(self._store(_BEHIND))
        ports = [int(str(store.options[name])) for name in ("port", "data_port")]
        network = stack.enter_context(TcpProxy("127.0.0.1", _BEHIND, ports))
        return store, network, store.address

    def _store(self, host: str) -> StoreProcess:
        return StoreProcess(
            self._folder / "log",
            arena="64MiB",
            host=host,
            token=_TOKEN,
            spill=self._folder / "spill",
            transports=json.dumps([self._transport]),
        )

    def _settings(self, address: str, token: Path) -> Settings:
        options = {
            "peers": [address],
            "transports": [self._transport],
            "token_file": str(token),
            "request_seconds": 0.3,
            "transfer_seconds": 1.0,
            "connect_seconds": 0.5,
        }
        tier = {"name": "pool", "backend": "pool", "options": options}
        return Settings(tiers=[tier], staging_bytes=1 << 23, load_deadline=2.0)

    async def _phase(
        self, flow: CacheFlow, fault: str, store: StoreProcess, network: TcpProxy | NetNamespace
    ) -> Phase:
        phase = Phase(fault)
        published, corrupt = self._watch.published, self._watch.corrupt
        await self._restores(flow, phase)  # healthy, and then:
        begin, end = _ways(fault, store, network)
        await asyncio.to_thread(begin)
        await self._restores(flow, phase)
        await asyncio.to_thread(end)
        start = time.monotonic()
        before = self._watch.published
        while self._watch.published == before:
            if time.monotonic() - start > _LIMIT:
                raise RuntimeError(f"{fault}: the store is not used again")
            await self._restore(flow, phase, 0, "load")
        phase.recovered_s = time.monotonic() - start
        phase.loaded = self._watch.published - published
        phase.corrupt = self._watch.corrupt - corrupt
        return phase

    async def _restores(self, flow: CacheFlow, phase: Phase) -> None:
        for number in range(self._each):
            await self._restore(flow, phase, number, "load" if number % 2 else "adaptive")

    async def _restore(self, flow: CacheFlow, phase: Phase, number: int, policy: str) -> None:
        at = number % len(self._prompts)
        start = time.monotonic()
        tokens = await self._ask(flow, self._prompts[at], policy, save=False)
        phase.longest_s = max(phase.longest_s, time.monotonic() - start)
        phase.restores += 1
        phase.wrong_tokens += tokens != self._cold[at]

    async def _ask(
        self, flow: CacheFlow, prompt: Sequence[int], policy: str, *, save: bool
    ) -> list[int]:
        session, report = flow.session(), Generation()
        stream = session.generate(prompt, max_new_tokens=3, policy=policy, save=save, report=report)
        tokens = [token async for token in stream]
        await session.forget()
        if save:
            await flow.flush()
        return tokens


def _ways(
    fault: str, store: StoreProcess, network: TcpProxy | NetNamespace
) -> tuple[Callable[[], object], Callable[[], object]]:
    """How the fault begins and how it ends. Both block."""
    match fault, network:
        case "kill", _:
            return store.kill, store.start
        case "stop", _:
            return store.freeze, store.thaw
        case "unplugged", NetNamespace():
            return network.unplug, network.plug
        case "cut", TcpProxy():
            return network.cut, network.cut
        case "black hole", TcpProxy():
            return network.swallow, network.pass_on
    raise ValueError(fault)


def wrong(phases: Sequence[Phase]) -> list[str]:
    """What must not be."""
    problems = []
    for phase in phases:
        if phase.wrong_tokens or phase.corrupt:
            problems.append(f"{phase.fault}: {phase.wrong_tokens} wrong, {phase.corrupt} corrupt")
        if not phase.loaded:
            problems.append(f"{phase.fault}: nothing was loaded")
    return problems


def show(phases: Sequence[Phase]) -> None:
    """The phases for people."""
    table = Table(title="restores over a pool in trouble")
    for name in ("fault", "restores", "wrong", "loads", "corrupt", "longest s", "recovered s"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for phase in phases:
        table.add_row(
            phase.fault,
            *map(str, (phase.restores, phase.wrong_tokens, phase.loaded, phase.corrupt)),
            f"{phase.longest_s:.2f}",
            f"{phase.recovered_s:.2f}",
        )
    Console().print(table)


async def main(options: argparse.Namespace) -> list[Phase]:
    """The campaign on a model of the rig."""
    async with opened(options) as rig:
        with tempfile.TemporaryDirectory() as folder:
            campaign = Campaign(
                rig.engine,
                Path(folder),
                options.restores,
                options.tokens,
                options.transport,
                namespace=options.namespace,
            )
            return await campaign.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--restores", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--transport", default="tcp", help="nixl: with UCX_TLS set, or on RDMA")
    where = "the store in a network namespace, whose cable is pulled: for root, on Linux"
    parser.add_argument("--namespace", action="store_true", help=where)
    arguments = parser.parse_args()
    logging.getLogger("cacheflow").setLevel(logging.ERROR)
    if arguments.namespace and (reason := why_no_namespace()) is not None:
        raise SystemExit(reason)
    found = uvloop.run(main(arguments))
    if arguments.json:
        print(json.dumps([asdict(phase) for phase in found], indent=1))
    else:
        show(found)
    if problems := wrong(found):
        raise SystemExit("; ".join(problems))

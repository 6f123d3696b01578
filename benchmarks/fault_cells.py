"""One cell of the fault matrix: a fault, a medium, a set-up of tiers, and a real engine over them.

Runs requests before, during and after the fault and says what it saw; knows no table and no limits
but those of :class:`Limits`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.registry import load_backend
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings
from cacheflow.testing.faults import Fault, FaultKind, FaultyBackend
from cacheflow.testing.store_process import StoreProcess
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.tiers.tier import Tier
from cacheflow.types import LayersComputed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.costs import ComputeModel
    from cacheflow.testing.vault import Vault
    from cacheflow.types import Event

__all__ = ["FAULTS", "MEDIA", "REMOTE", "SETUPS", "Cell", "Limits", "Seen", "Stage"]

MEDIA: Final = ("dram", "nvme", "object-store", "throttled")
REMOTE: Final = {"pool": "tcp", "pool-nixl": "nixl"}
"""Media that are another process, and how their bytes come (for NIXL set ``UCX_TLS``): only those
who ask for them get them."""
SETUPS: Final = ("alone", "first", "second", "both")
"""The sick tier alone; before a good one; behind a good one that has half; two sick ones."""
_ANYWHERE: Final = tuple(
    FaultKind(kind) for kind in ("slow", "hang", "eio", "disconnect", "partial", "raise")
)
FAULTS: Final = (
    *(Fault(k, "load") for k in FaultKind if k not in (FaultKind.LOST, FaultKind.FULL)),
    *(Fault(k, "*") for k in _ANYWHERE),
    *(Fault(k, "store") for k in (FaultKind.LOST, FaultKind.FULL)),
)
_NEW_TOKENS: Final = 3
_DEADLINE: Final = 2.0
_PATIENCE: Final = 60.0
_TRIES: Final = 5
_MOMENTS: Final = 300
_QUICK: Final = HealthLimits(first_wait=0.05, longest_wait=0.5)
"""Probed often, so that a cell does not wait long for its tier to be taken back."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What goes wrong, where, and beside what."""

    fault: Fault
    medium: str
    setup: str

    @property
    def name(self) -> str:
        return f"{self.fault.kind}@{self.fault.operation}, {self.medium}, {self.setup}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Time to the first token: at most ``ratio`` times recompute alone, and ``seconds`` more."""

    ratio: float = 1.10
    seconds: float = 0.05


@dataclass(slots=True)
class Seen:
    """What came of a cell."""

    cell: Cell
    ttft: list[float] = field(default_factory=list)
    """Of requests during the fault, one at a time."""
    recompute: list[float] = field(default_factory=list)
    """Recompute alone before the first of them, between them, and after the last."""
    waited: list[float] = field(default_factory=list)
    """Seconds in which compute stood still before the first token, less those of recompute alone:
    what other programs did to compute is not in it."""
    strikes: int = 0
    wrong: list[str] = field(default_factory=list)
    """What should not have happened."""

    @property
    def baselines(self) -> list[float]:
        """Of each request: the mean of recompute alone right before and right after it."""
        return [(a + b) / 2 for a, b in pairwise(self.recompute)]

    @property
    def disagreement(self) -> float:
        """How much longer the longest recompute took than the shortest: what other programs did."""
        return max(self.recompute) / min(self.recompute) - 1 if self.recompute else 0.0

    @property
    def ratio(self) -> float:
        """The worst time to the first token over that of recompute alone."""
        return max(a / b for a, b in zip(self.ttft, self.baselines, strict=True))

    def excess(self, limits: Limits) -> float:
        """Seconds beyond the limit, of the worst request."""
        pairs = zip(self.ttft, self.baselines, strict=True)
        return max(a - limits.ratio * b - limits.seconds for a, b in pairs)


class Stage:
    """An engine, prompts with their cold tokens, and their KV to fill stores with.

    ``longer`` begins with ``prompt``: a later turn, whose chunks have yet to be stored.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        prompt: Sequence[int],
        longer: Sequence[int],
        compute: ComputeModel,
        bandwidth: float,
        staging: int = 64 << 20,
        media: Sequence[str] = MEDIA,
    ) -> None:
        self.engine = engine
        self.prompt = list(prompt)
        self.longer = list(longer)
        self._folder = folder
        self._compute = compute
        self._bandwidth = bandwidth
        self._staging = staging
        self._media = media
        self._remote: dict[str, StoreProcess] = {}
        """By transport: the same one for all cells."""
        self._stores = 0
        self._computed = 0.0
        """Seconds of compute since a request was begun."""
        self._told = asyncio.Event()
        """Some tier was set aside, or taken back."""
        self._vault: Vault
        self._cold: dict[int, list[int]] = {}

    async def prepare(self) -> None:
        """Compute everything once, without any store; open every medium once: what they keep for
        the life of the process is there from then on."""
        for medium in self._media:
            await (await self._open(medium)).aclose()
        from cacheflow.testing.vault import Vault

        whole = (
            len(self.prompt) // self.engine.layout.chunk_tokens * self.engine.layout.chunk_tokens
        )
        await self.engine.open("cold", self.prompt)
        for tile in self.engine.grid.split(0, whole):
            await self.engine.prefill("cold", tile.start, tile.stop)
        self._vault = await Vault.take(self.engine, "cold", self.prompt[:whole])
        await self.engine.close("cold")
        settings = Settings(staging_bytes=self._staging)
        opened = CacheFlow.open(settings, engine=self.engine, backends={}, compute=self._compute)
        async with opened as flow:
            for prompt in (self.prompt, self.longer):
                self._cold[len(prompt)] = await _ask(flow, "cold", prompt, Generation())

    async def aclose(self) -> None:
        """End the store processes, if there are any."""
        for store in self._remote.values():
            await asyncio.to_thread(store.kill)

    async def run(self, cell: Cell) -> Seen:
        """Healthy, sick, and well again; nothing may be left at the end."""
        seen = Seen(cell)
        before = _belongings()
        faulty: list[FaultyBackend] = []
        async with AsyncExitStack() as stack:
            tiers = await self._tiers(cell, faulty, stack)
            settings = Settings(
                staging_bytes=self._staging, load_deadline=_DEADLINE, flush_seconds=_DEADLINE
            )
            flow = await stack.enter_async_context(
                CacheFlow.open(
                    settings,
                    engine=self.engine,
                    backends=tiers,
                    compute=self._compute,
                    observer=self._hear,
                )
            )
            await self._restore(flow, seen, "healthy")
            for each in faulty:
                each.inject(cell.fault)
            await self._while_sick(flow, seen)
            seen.strikes = sum(each.strikes.total() for each in faulty)
            for each in faulty:
                each.heal()
            await self._well_again(flow, tiers, seen)
            await self._check_memory(flow, seen)
        await self._check_belongings(before, seen)
        return seen

    # -- requests ------------------------------------------------------------------------------

    async def _while_sick(self, flow: CacheFlow, seen: Seen) -> None:
        cold, still = await self._timed(flow, seen, "recompute")
        seen.recompute.append(cold)
        for number in range(2):
            ours, waited = await self._timed(flow, seen, "adaptive", f"sick {number}")
            cold, after = await self._timed(flow, seen, "recompute")
            seen.recompute.append(cold)
            seen.ttft.append(ours)
            seen.waited.append(waited - (still + after) / 2)
            still = after
        await asyncio.gather(*(self._restore(flow, seen, f"sharer {i}") for i in range(3)))
        await self._restore(flow, seen, "turn", prompt=self.longer, save=True)
        await flow.flush(_DEADLINE)

    async def _well_again(self, flow: CacheFlow, tiers: dict[str, Tier], seen: Seen) -> None:
        guards = [tier.inner for tier in tiers.values()]
        try:
            async with asyncio.timeout(_PATIENCE):
                while not all(isinstance(g, Guarded) and g.reading.well for g in guards):
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            seen.wrong.append("a tier was not taken back")
        await self._restore(flow, seen, "after", prompt=self.longer, save=True)
        await flow.flush(_PATIENCE)
        for _ in range(_TRIES):  # a small model is sometimes done before a lookup has answered
            report = await self._restore(flow, seen, "repaired", prompt=self.longer, policy="load")
            if report.restoration is not None and report.restoration.loaded_cells:
                return
        seen.wrong.append("nothing was loaded after the fault")

    async def _timed(
        self, flow: CacheFlow, seen: Seen, policy: str, name: str = "recompute"
    ) -> tuple[float, float]:
        """Seconds to the first token, and those of them in which compute stood still."""
        self._computed = 0.0
        report = await self._restore(flow, seen, name, policy=policy)
        seconds = report.ttft_seconds or 0.0
        return seconds, seconds - self._computed

    def _hear(self, event: Event) -> None:
        if isinstance(event, LayersComputed):
            self._computed += event.stop - event.starts[0]

    async def _restore(
        self,
        flow: CacheFlow,
        seen: Seen,
        name: str,
        *,
        prompt: Sequence[int] | None = None,
        policy: str = "adaptive",
        save: bool = False,
    ) -> Generation:
        report = Generation()
        prompt = self.prompt if prompt is None else prompt
        try:
            async with asyncio.timeout(_PATIENCE):
                tokens = await _ask(flow, name, prompt, report, policy=policy, save=save)
        except Exception as error:  # a bench: whatever a request dies of is what it is to show
            seen.wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if tokens != self._cold[len(prompt)]:
                seen.wrong.append(f"{name}: other tokens than cold")
        return report

    # -- tiers ---------------------------------------------------------------------------------

    async def _tiers(
        self, cell: Cell, faulty: list[FaultyBackend], stack: AsyncExitStack
    ) -> dict[str, Tier]:
        """By name, in their order; the sick ones in ``faulty``."""
        chunks = range(len(self._vault.keys))
        sick = [cell.medium] if cell.setup != "both" else [cell.medium, "dram"]
        stores = [(f"sick{i}", medium, chunks) for i, medium in enumerate(sick)]
        if cell.setup == "first":
            stores.append(("good", "dram", chunks))
        if cell.setup == "second":
            stores.insert(0, ("good", "dram", chunks[::2]))
        tiers: dict[str, Tier] = {}
        for name, medium, have in stores:
            inner = await self._open(medium)
            for chunk in have:
                await self._vault.put(inner, chunk)
            if name != "good":
                inner = FaultyBackend(inner, seed=len(tiers))
                faulty.append(inner)
            guarded = Guarded(
                inner,
                name,
                deadline=_DEADLINE,
                limits=_QUICK,
                observer=lambda _: self._told.set(),
            )
            tier = await Tier.over(guarded, TierSettings(name=name, backend=medium))
            stack.push_async_callback(tier.aclose)
            tiers[name] = tier
        return tiers

    async def _open(self, medium: str) -> StorageBackend:
        if medium in REMOTE:
            return await self._open_pool(REMOTE[medium])
        self._stores += 1
        folder = self._folder / str(self._stores)
        nvme = {"path": str(folder), "fsync": False}
        options: dict[str, dict[str, object]] = {
            "dram": {"capacity_bytes": 256 << 20},
            "nvme": nvme,
            "object-store": {"url": folder.as_uri()},
            "throttled": {"inner": "nvme", "inner_options": nvme, "bandwidth": self._bandwidth},
        }
        if medium == "object-store":
            await asyncio.to_thread(folder.mkdir)
        kind = await asyncio.to_thread(load_backend, medium)
        return await kind.open(options[medium])

    async def _open_pool(self, transport: str) -> StorageBackend:
        """An empty store in another process."""
        if transport not in self._remote:
            options = {"arena": "256MiB", "transports": f'["{transport}"]'}
            store = StoreProcess(self._folder / "store.log", **options)
            self._remote[transport] = await asyncio.to_thread(store.start)
        address = self._remote[transport].address
        kind = await asyncio.to_thread(load_backend, "pool")
        pool = await kind.open({"peers": [address], "transports": [transport]})
        await pool.delete([info.key async for info in pool.scan()])
        return pool

    # -- what is left --------------------------------------------------------------------------

    async def _check_memory(self, flow: CacheFlow, seen: Seen) -> None:
        pool = flow.restorer.pool
        for _ in range(_MOMENTS):  # what is being put back when the last request has ended
            if pool.leased_bytes:
                await asyncio.sleep(0.01)
        left = {
            "leased bytes": pool.leased_bytes,
            "quarantined bytes": pool.quarantined_bytes(),
            "requests": len(flow.restorer._jobs),
            "bytes of KV": self.engine.kv_used_bytes,
        }
        seen.wrong += [f"{count} {what} left" for what, count in left.items() if count]

    async def _check_belongings(self, before: tuple[set[Any], int], seen: Seen) -> None:
        tasks, files = before
        now = _belongings()
        if left := now[0] - tasks:
            seen.wrong.append(f"tasks left: {left}")
        if now[1] > files:
            seen.wrong.append(f"{now[1] - files} open files left")
        names = await asyncio.to_thread(lambda: list(self._folder.glob("*/tmp/*")))
        if names:
            seen.wrong.append(f"{len(names)} temporary files left")


async def _ask(
    flow: CacheFlow,
    name: str,
    prompt: Sequence[int],
    report: Generation,
    *,
    policy: str = "recompute",
    save: bool = False,
) -> list[int]:
    session = flow.session(name)
    stream = session.generate(
        prompt, max_new_tokens=_NEW_TOKENS, report=report, policy=policy, save=save
    )
    try:
        return [token async for token in stream]
    finally:
        await session.forget()


def _belongings() -> tuple[set[Any], int]:
    """Tasks, and how many files are open."""
    return set(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))

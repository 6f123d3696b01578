"""What every benchmark on a real engine shares: stored prompts, links, restorers and timed runs.

Restores below the session facade, so that nothing but the restore is timed. Knows no figures:
those are the benchmarks' own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import chunk_keys, key_root
from cacheflow.memory import StagingPool
from cacheflow.registry import load_backend
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.restore.saver import Saver
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.tiers.staged import StagedCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.restore import Restoration
    from cacheflow.scheduling import Policy
    from cacheflow.settings import TierSettings
    from cacheflow.types import ChunkKey, Event

__all__ = ["Prompt", "Rig", "Run", "SUFFIX_TOKENS", "real_tokens"]

SUFFIX_TOKENS: Final = 16
_STAGING: Final = 256 << 20
_DEADLINE: Final = 300.0
"""Seconds that one load may take: some links are slow on purpose."""
_APART: Final = 1e-6
"""Seconds between requests that arrive together, so that "first come" has one meaning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens whose first ``prefix`` (whole chunks, named by ``keys``) may be restored."""

    tokens: Sequence[int]
    prefix: int
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Restores that arrived together; entry ``i`` of each tuple is the ``i``-th prompt given."""

    ids: tuple[str, ...]
    restorations: tuple[Restoration, ...]
    first_tokens: tuple[float, ...]
    """Seconds from arrival until the engine had handed out the first token."""
    events: tuple[Event, ...]

    @property
    def ttft(self) -> tuple[float, ...]:
        """Seconds from arrival until the suffix was computed."""
        return tuple(one.computed_seconds for one in self.restorations)

    @property
    def mean(self) -> float:
        """Mean TTFT in seconds."""
        return sum(self.ttft) / len(self.ttft)

    @property
    def last(self) -> float:
        """Seconds until the last request had its suffix computed."""
        return max(self.ttft)


class Rig:
    """An engine, a folder for stored KV, staging memory, and compute costs that stay warm.

    One run at a time.
    """

    def __init__(self, engine: Any, folder: Path, tier: TierSettings | None = None) -> None:
        """``tier``: what keeps the KV; None: an nvme store in ``folder``."""
        self.engine = engine
        self.folder = folder
        self._tier = tier
        self.clock = SystemClock()
        self.costs = ComputeModel(*engine.layer_flops)
        self.pool = StagingPool(_STAGING)
        self.events: list[Event] = []
        """Of the latest run."""
        self._runs = 0

    def prompt(self, tokens: Sequence[int], suffix: int = SUFFIX_TOKENS) -> Prompt:
        """All whole chunks before the last ``suffix`` tokens are the prefix."""
        size = self.engine.layout.chunk_tokens
        chunks = (len(tokens) - suffix) // size
        keys = chunk_keys(key_root(self.engine.identity), tokens, size)
        return Prompt(tokens, chunks * size, tuple(keys[:chunks]))

    def nbytes(self, tokens: int) -> int:
        """Bytes that loading a prefix of ``tokens`` moves."""
        layout = self.engine.layout
        return int(tokens // layout.chunk_tokens * layout.payload_bytes())

    async def fill(self, prompts: Sequence[Prompt], tell: Callable[[], None]) -> None:
        """Prefill every prefix on the grid, telling after each tile, and store its chunks.

        All are open at once: that also maps the KV memory that a batch of them needs.
        """
        store = await self.open_link(None)
        staged = StagedCopies({"store": store})
        async with Saver(
            self.engine, {"store": store}, self.pool, self.clock, lambda _: None, staged
        ) as saver:
            await self._fill(prompts, saver, tell)
        await staged.aclose()
        await store.aclose()

    async def _fill(
        self, prompts: Sequence[Prompt], saver: Saver, tell: Callable[[], None]
    ) -> None:
        names = [f"fill-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            await self.engine.open(name, prompt.tokens)
        for name, prompt in zip(names, prompts, strict=True):
            for tile in self.engine.grid.split(0, prompt.prefix):
                await self.engine.prefill(name, tile.start, tile.stop)
                tell()
            saved = saver.save(name, prompt.keys)["store"]
            await saver.flush()
            assert not saved.dropped, saved
        for name in names:
            await self.engine.close(name)

    async def open_link(
        self, bandwidth: float | None, folder: Path | None = None
    ) -> StorageBackend:
        """The store behind a link of ``bandwidth`` bytes a second; None is the store itself."""
        name = "nvme"
        options: dict[str, object] = {"path": str(folder or self.folder)}
        if self._tier is not None and folder is None:
            name, options = self._tier.backend, dict(self._tier.options)
        if bandwidth is not None:
            options = {"inner": name, "inner_options": options, "bandwidth": bandwidth}
            name = "throttled"
        found = await asyncio.to_thread(load_backend, name)
        backend = await found.open(options)
        backend.register_memory(self.pool.arena)  # until the backend is closed
        return backend

    def restorer(self, channels: Mapping[str, StorageBackend], objective: str = "tail") -> Restorer:
        """A restorer on this engine with cold channel models; ``objective``: the scheduler's."""
        ahead = self.engine.claim_ahead
        scheduler = BatchScheduler(self.costs, self.clock, objective=objective, claim_ahead=ahead)
        return Restorer(
            self.engine,
            scheduler,
            channels,
            self.pool,
            clock=self.clock,
            load_deadline=_DEADLINE,
            observer=lambda event: self.events.append(event),
        )

    async def together(
        self, restorer: Restorer, prompts: Sequence[Prompt], policy: str | Policy
    ) -> Run:
        """Restore ``prompts``, arriving at once in this order; nothing of it stays in memory."""
        policy = load_policy(policy) if isinstance(policy, str) else policy
        self._runs += 1
        self.events = []
        names = [f"run-{self._runs}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            await self.engine.open(name, prompt.tokens)
        start = self.clock.now()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(restorer, name, prompt, policy, start + i * _APART))
                    for i, (name, prompt) in enumerate(zip(names, prompts, strict=True))
                ]
        finally:
            for name in names:
                await self.engine.close(name)
        results = [task.result() for task in tasks]
        return Run(
            tuple(names),
            tuple(restoration for restoration, _ in results),
            tuple(seconds for _, seconds in results),
            tuple(self.events),
        )

    async def alone(self, restorer: Restorer, prompt: Prompt, policy: str | Policy) -> Restoration:
        """Restore one prompt."""
        return (await self.together(restorer, [prompt], policy)).restorations[0]

    async def _one(
        self, restorer: Restorer, name: str, prompt: Prompt, policy: Policy, arrival: float
    ) -> tuple[Restoration, float]:
        request = RestoreRequest(name, prompt.tokens, prompt.keys, arrival)
        restoration = await restorer.run(request, policy)
        await self.engine.first_token(name)
        return restoration, self.clock.now() - arrival

    async def aclose(self) -> None:
        """Close the engine and give the staging memory back."""
        await self.engine.aclose()
        await self.pool.aclose()


def real_tokens(tokenizer: Any, count: int) -> list[int]:
    """``count`` token ids of text that every machine has: the source of Python's own asyncio."""
    tokens: list[int] = []
    for path in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        tokens += tokenizer(path.read_text(encoding="utf-8")).input_ids
        if len(tokens) >= count:
            return tokens[:count]
    return (tokens * (count // len(tokens) + 1))[:count]

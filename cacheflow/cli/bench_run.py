"""The runs behind ``cacheflow bench``: recompute alone, load alone and adaptive, interleaved.

Measures restores below the session facade, so that nothing but the restore is timed. Knows
nothing of how results are shown.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.cli.demo_report import ADAPTIVE, Link, cell_seconds, fluid
from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import chunk_keys, key_root
from cacheflow.memory import StagingPool
from cacheflow.registry import load_backend
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.restore.saver import Saver
from cacheflow.scheduling import BatchScheduler, load_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.restore import Restoration
    from cacheflow.types import Event

__all__ = ["Bench", "LagProbe", "Point", "SUFFIX_TOKENS", "real_tokens"]

SUFFIX_TOKENS: Final = 16
_SLOW: Final = 0.5
"""On slower links than this, load alone is measured on a shorter prefix and scaled."""
_SCALED_TOKENS: Final = 1024
_SAMPLE_SECONDS: Final = 0.02
"""Between samples of the loop's lag, in all three ways alike: waking more often than this takes
the GIL from the compute thread so often that it slows it down by a tenth."""
_MOMENT: Final = 1.0
_REPEATS: Final = 7
"""Pairs of runs in a round where load alone takes less than a moment, in seconds."""
_STAGING: Final = 256 << 20
_DEADLINE: Final = 300.0
"""Seconds that one load may take: some links are slow on purpose."""


@dataclass
class Point:
    """One prefix length over one link: seconds until the prefix was ready, a value a round."""

    tokens: int
    link: Link
    recompute: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    adaptive: list[float] = field(default_factory=list)
    fluid: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    load_is_scaled: bool = False

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, and how far adaptive is from the better single way."""
        ways = (self.recompute, self.load, self.adaptive)
        recompute, load, ours = (statistics.median(way) for way in ways)
        better = min(recompute, load)
        efficiency = [f / a for f, a in zip(self.fluid, self.adaptive, strict=True)]
        return {
            "tokens": self.tokens,
            "compute_io": self.link.name,
            "recompute_s": recompute,
            "load_s": load,
            "adaptive_s": ours,
            "fluid_s": statistics.median(self.fluid),
            "efficiency": statistics.median(efficiency),
            "speedup": better / ours,
            "excess_ms": (ours - better) * 1e3,
            "allowed_ms": max(0.03 * better, 0.002) * 1e3,
            "recomputed_share": statistics.median(self.recomputed),
            "rounds": len(self.adaptive),
            "spread": (max(self.adaptive) - min(self.adaptive)) / ours,
            "load_is_scaled": self.load_is_scaled,
        }


class LagProbe:
    """Samples how late the event loop wakes while it is entered."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._sample())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_SAMPLE_SECONDS)
            self._lags.append(time.perf_counter() - before - _SAMPLE_SECONDS)

    def quantile(self, q: float) -> float:
        """Seconds of lag that a share ``q`` of the samples stayed under (0 without samples)."""
        ordered = sorted(self._lags)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class Bench:
    """An engine, a store that holds the KV of ``tokens``, and cost models that stay warm."""

    def __init__(self, engine: Any, folder: Path, tokens: Sequence[int]) -> None:
        self.lag = LagProbe()
        self._engine = engine
        self._folder = folder
        self._tokens = list(tokens)
        self._clock = SystemClock()
        self._costs = ComputeModel(*engine.layer_flops)
        self._pool = StagingPool(_STAGING)
        root = key_root(engine.identity)
        self._keys = chunk_keys(root, self._tokens, engine.layout.chunk_tokens)
        self._runs = 0

    async def fill(self, tell: Callable[[], None]) -> None:
        """Prefill all tokens on the grid, telling after each tile, and store their chunks."""
        store = await self._open(Link("raw", None), 0.0)
        await self._engine.open("fill", self._tokens)
        for tile in self._engine.grid.split(0, len(self._tokens)):
            await self._engine.prefill("fill", tile.start, tile.stop)
            tell()
        saver = Saver(self._engine, {"store": store}, self._pool, self._clock, lambda _: None)
        saved = (await saver.save("fill", self._keys))["store"]
        assert not saved.dropped, saved
        saver.close()
        await self._engine.close("fill")
        await store.aclose()

    async def measure(self, points: Sequence[Point], rounds: int, tell: Callable[[], None]) -> None:
        """All links of one length: a round is recompute once, then each link's two ways."""
        tokens = points[0].tokens
        async with AsyncExitStack() as stack:
            recompute, cells = await self._recompute(tokens)
            restorers = []
            for point in points:
                backend = await self._open(point.link, self._bytes(tokens) / recompute)
                stack.push_async_callback(backend.aclose)
                restorer = self._restorer({"link": backend})
                restorers.append(await stack.enter_async_context(restorer))
            for number in range(rounds):
                if number:
                    recompute, cells = await self._recompute(tokens)
                for point, restorer in zip(points, restorers, strict=True):
                    point.recompute.append(recompute)
                    await self._both(restorer, point, cells)
                    tell()

    async def _both(
        self, restorer: Restorer, point: Point, cells: dict[tuple[int, int], float]
    ) -> None:
        """Load alone, then adaptive, over one link; several times where that is over in moments."""
        tiles = self._engine.grid.split(0, point.tokens)
        layers = self._engine.layout.num_layers
        for _ in range(_REPEATS):
            point.load.append(await self._load_alone(restorer, point))
            result = await self._run(restorer, point.tokens, ADAPTIVE)
            point.adaptive.append(result.restored_seconds)
            point.recomputed.append(result.recomputed_share)
            point.fluid.append(fluid(cells, point.load[-1], tiles, layers))
            if point.load[-1] > _MOMENT:
                break

    async def _recompute(self, tokens: int) -> tuple[float, dict[tuple[int, int], float]]:
        """Seconds, and seconds of every cell, of recompute alone."""
        events: list[Event] = []
        async with self._restorer({}, events.append) as restorer:
            result = await self._run(restorer, tokens, "recompute")
        return result.restored_seconds, cell_seconds(events)

    async def _load_alone(self, restorer: Restorer, point: Point) -> float:
        """Seconds of load alone; where that takes minutes, of a shorter prefix, scaled."""
        tokens, ratio = point.tokens, point.link.ratio
        if ratio is not None and ratio < _SLOW and tokens > _SCALED_TOKENS:
            point.load_is_scaled = True
            tokens = _SCALED_TOKENS
        result = await self._run(restorer, tokens, "load")
        return result.restored_seconds * point.tokens / tokens

    async def _run(self, restorer: Restorer, tokens: int, policy: str) -> Restoration:
        """One restore of the first ``tokens`` tokens; nothing of it stays in memory."""
        self._runs += 1
        name = f"run-{self._runs}"
        prompt = self._tokens[: tokens + SUFFIX_TOKENS]
        keys = self._keys[: tokens // self._engine.layout.chunk_tokens]
        await self._engine.open(name, prompt)
        try:
            async with self.lag:
                request = RestoreRequest(name, prompt, keys, self._clock.now())
                return await restorer.run(request, load_policy(policy))
        finally:
            await self._engine.close(name)

    def _restorer(
        self, channels: dict[str, StorageBackend], observer: Callable[[Event], None] | None = None
    ) -> Restorer:
        ahead = self._engine.claim_ahead
        scheduler = BatchScheduler(self._costs, self._clock, claim_ahead=ahead)
        return Restorer(
            self._engine,
            scheduler,
            channels,
            self._pool,
            clock=self._clock,
            load_deadline=_DEADLINE,
            observer=observer,
        )

    async def _open(self, link: Link, balanced: float) -> StorageBackend:
        """The store behind ``link``; ``balanced``: bytes a second at which both ways are equal."""
        options = {"path": str(self._folder)}
        if link.ratio is None:
            return await load_backend("nvme").open(options)
        throttled = await asyncio.to_thread(load_backend, "throttled")
        bandwidth = balanced * link.ratio
        inner = {"inner": "nvme", "inner_options": options}
        return await throttled.open({**inner, "bandwidth": bandwidth})

    def _bytes(self, tokens: int) -> int:
        layout = self._engine.layout
        return int(tokens // layout.chunk_tokens * layout.payload_bytes())


def real_tokens(tokenizer: Any, count: int) -> list[int]:
    """``count`` token ids of text that every machine has: the source of Python's own asyncio."""
    tokens: list[int] = []
    for path in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        tokens += tokenizer(path.read_text(encoding="utf-8")).input_ids
        if len(tokens) >= count:
            return tokens[:count]
    return (tokens * (count // len(tokens) + 1))[:count]

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
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.demo_report import ADAPTIVE, Link, cell_seconds, fluid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.restore import Restoration, Restorer

__all__ = ["Bench", "LagProbe", "Point"]

_SLOW: Final = 0.5
"""On slower links than this, load alone is measured on a shorter prefix and scaled."""
_SCALED_TOKENS: Final = 1024
_SAMPLE_SECONDS: Final = 0.02
"""Between samples of the loop's lag, in all three ways alike: waking more often than this takes
the GIL from the compute thread so often that it slows it down by a tenth."""
_MOMENT: Final = 1.0
_REPEATS: Final = 7
"""Pairs of runs in a round where load alone takes less than a moment, in seconds."""


@dataclass
class Point:
    """One prefix length over one link: seconds to the first token, a value a round.

    Every way computes the same short suffix; ``fluid`` is the bound of the restore plus the suffix
    as it takes when everything is there.
    """

    tokens: int
    link: Link
    recompute: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    adaptive: list[float] = field(default_factory=list)
    fluid: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    load_is_scaled: bool = False

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, and how far adaptive is from the better single way: the median
        over pairs that ran one after the other, since a disk's speed drifts more than that."""
        ways = (self.recompute, self.load, self.adaptive)
        recompute, load, ours = (statistics.median(way) for way in ways)
        better = min(recompute, load)
        efficiency = [f / a for f, a in zip(self.fluid, self.adaptive, strict=True)]
        single = self.load if load <= recompute else [recompute] * len(self.adaptive)
        excess = [a - s for a, s in zip(self.adaptive, single, strict=True)]
        return {
            "tokens": self.tokens,
            "compute_io": self.link.name,
            "recompute_s": recompute,
            "load_s": load,
            "adaptive_s": ours,
            "fluid_s": statistics.median(self.fluid),
            "efficiency": statistics.median(efficiency),
            "speedup": better / ours,
            "excess_ms": statistics.median(excess) * 1e3,
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

    def __init__(self, rig: Rig, tokens: Sequence[int]) -> None:
        """``rig``: still the caller's to close."""
        self.lag = LagProbe()
        self._rig = rig
        self._tokens = list(tokens)

    async def fill(self, tell: Callable[[], None]) -> None:
        """Prefill all tokens on the grid, telling after each tile, and store their chunks."""
        await self._rig.fill([self._rig.prompt(self._tokens)], tell)

    async def measure(self, points: Sequence[Point], rounds: int, tell: Callable[[], None]) -> None:
        """All links of one length: a round is recompute once, then each link's two ways."""
        tokens = points[0].tokens
        async with AsyncExitStack() as stack:
            alone = await stack.enter_async_context(self._rig.restorer({}))
            recompute, suffix, cells = await self._recompute(alone, tokens)
            restorers = []
            for point in points:
                bandwidth = point.link.bandwidth(self._rig.nbytes(tokens), recompute)
                backend = await self._rig.open_link(bandwidth)
                stack.push_async_callback(backend.aclose)
                restorer = self._rig.restorer({"link": backend})
                restorers.append(await stack.enter_async_context(restorer))
            for number in range(rounds):
                if number:
                    recompute, suffix, cells = await self._recompute(alone, tokens)
                for point, restorer in zip(points, restorers, strict=True):
                    point.recompute.append(recompute + suffix)
                    await self._both(restorer, point, suffix, cells)
                    tell()

    async def _both(
        self,
        restorer: Restorer,
        point: Point,
        suffix: float,
        cells: dict[tuple[int, int], float],
    ) -> None:
        """Load alone, then adaptive, over one link; several times where that is over in moments."""
        layout, grid = self._rig.engine.layout, self._rig.engine.grid
        for _ in range(_REPEATS):
            point.load.append(await self._load_alone(restorer, point, suffix))
            result = await self._run(restorer, point.tokens, ADAPTIVE)
            point.adaptive.append(result.computed_seconds)
            point.recomputed.append(result.recomputed_share)
            tiles = grid.split(0, point.tokens)
            load = point.load[-1] - suffix
            point.fluid.append(fluid(cells, load, tiles, layout.num_layers) + suffix)
            if point.load[-1] > _MOMENT:
                break

    async def _recompute(
        self, restorer: Restorer, tokens: int
    ) -> tuple[float, float, dict[tuple[int, int], float]]:
        """Seconds of recompute alone, of the suffix after it, and of every cell."""
        result = await self._run(restorer, tokens, "recompute")
        suffix = result.computed_seconds - result.restored_seconds
        return result.restored_seconds, suffix, cell_seconds(self._rig.events)

    async def _load_alone(self, restorer: Restorer, point: Point, suffix: float) -> float:
        """Seconds of load alone; where that takes minutes, of a shorter prefix, scaled."""
        tokens, ratio = point.tokens, point.link.ratio
        if ratio is not None and ratio < _SLOW and tokens > _SCALED_TOKENS:
            point.load_is_scaled = True
            tokens = _SCALED_TOKENS
        result = await self._run(restorer, tokens, "load")
        return (result.computed_seconds - suffix) * point.tokens / tokens + suffix

    async def _run(self, restorer: Restorer, tokens: int, policy: str) -> Restoration:
        """One restore of the first ``tokens`` tokens; nothing of it stays in memory."""
        prompt = self._rig.prompt(self._tokens[: tokens + SUFFIX_TOKENS])
        async with self.lag:
            return await self._rig.alone(restorer, prompt, policy)

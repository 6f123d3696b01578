"""The runs behind ``cacheflow bench``: recompute alone, load alone and adaptive, interleaved.

Measures restores below the session facade, so that nothing but the restore is timed. The bound of
a restore is as good as what it says of compute at that moment: recompute alone runs before and
after, each cell counts as what it took then, by how long ago, and how much that changed is told.
Knows nothing of how results are shown.
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
_STEADY: Final = 0.1
"""Rounds between whose ends recompute alone changed by more say little, and count where no other
does."""
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
    drift: list[float] = field(default_factory=list)
    """What recompute alone took after the run, by what it took before it."""
    load_is_scaled: bool = False

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, and how far adaptive is from the better single way: the median
        over pairs that ran one after the other, since a disk's speed drifts more than that."""
        ways = (self.recompute, self.load, self.adaptive)
        recompute, load, ours = (statistics.median(way) for way in ways)
        better = min(recompute, load)
        all_of_bound = [f / a for f, a in zip(self.fluid, self.adaptive, strict=True)]
        pairs = zip(all_of_bound, self.drift, strict=True)
        steady = [one for one, drift in pairs if abs(drift - 1) <= _STEADY]
        efficiency = steady or all_of_bound
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
            "efficiency_min": min(efficiency),
            "efficiency_max": max(efficiency),
            "steady": len(steady),
            "drift": max(self.drift, key=lambda drift: abs(drift - 1)),
            "speedup": better / ours,
            "excess_ms": statistics.median(excess) * 1e3,
            "allowed_ms": max(0.03 * better, 0.002) * 1e3,
            "recomputed_share": statistics.median(self.recomputed),
            "rounds": len(self.adaptive),
            "spread": (max(self.adaptive) - min(self.adaptive)) / ours,
            "load_is_scaled": self.load_is_scaled,
        }


@dataclass(frozen=True, slots=True)
class _Alone:
    """Recompute alone: when its middle was, seconds of it, of the suffix after it, and of every
    ``(tile, layer)``."""

    middle: float
    seconds: float
    suffix: float
    cells: dict[tuple[int, int], float]

    def at(self, later: _Alone, moment: float) -> tuple[dict[tuple[int, int], float], float]:
        """Seconds of every cell, and of the suffix, at a moment between this run and ``later``."""
        share = (moment - self.middle) / (later.middle - self.middle)
        cells = {
            cell: seconds + share * (later.cells[cell] - seconds)
            for cell, seconds in self.cells.items()
        }
        return cells, self.suffix + share * (later.suffix - self.suffix)


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
        """All links of one length: a round is each link's two ways, between two recomputes."""
        tokens = points[0].tokens
        async with AsyncExitStack() as stack:
            alone = await stack.enter_async_context(self._rig.restorer({}))
            before = await self._recompute(alone, tokens)
            restorers = []
            for point in points:
                bandwidth = point.link.bandwidth(self._rig.nbytes(tokens), before.seconds)
                backend = await self._rig.open_link(bandwidth)
                stack.push_async_callback(backend.aclose)
                restorer = self._rig.restorer({"link": backend})
                restorers.append(await stack.enter_async_context(restorer))
            for _ in range(rounds):
                middles: list[tuple[Point, float]] = []
                for point, restorer in zip(points, restorers, strict=True):
                    point.recompute.append(before.seconds + before.suffix)
                    moments = await self._both(restorer, point, before.suffix)
                    middles += [(point, moment) for moment in moments]
                    tell()
                after = await self._recompute(alone, tokens)
                for point, at in middles:
                    self._bound(point, before, after, at)
                before = after

    async def _both(self, restorer: Restorer, point: Point, suffix: float) -> list[float]:
        """Load alone, then adaptive, over one link; several times where that is over in moments.
        When the middle of each adaptive run was."""
        middles = []
        for _ in range(_REPEATS):
            point.load.append(await self._load_alone(restorer, point, suffix))
            start = time.perf_counter()
            result = await self._run(restorer, point.tokens, ADAPTIVE)
            middles.append((start + time.perf_counter()) / 2)
            point.adaptive.append(result.computed_seconds)
            point.recomputed.append(result.recomputed_share)
            if point.load[-1] > _MOMENT:
                break
        return middles

    def _bound(self, point: Point, before: _Alone, after: _Alone, at: float) -> None:
        """The fluid bound of the adaptive run whose middle was ``at``; they are told in order."""
        cells, suffix = before.at(after, at)
        layers, number = self._rig.engine.layout.num_layers, len(point.fluid)
        tiles = self._rig.engine.grid.split(0, point.tokens)
        load = point.load[number] - before.suffix
        point.fluid.append(fluid(cells, load, tiles, layers) + suffix)
        point.drift.append(after.seconds / before.seconds)

    async def _recompute(self, restorer: Restorer, tokens: int) -> _Alone:
        start = time.perf_counter()
        result = await self._run(restorer, tokens, "recompute")
        suffix = result.computed_seconds - result.restored_seconds
        middle = (start + time.perf_counter()) / 2
        return _Alone(middle, result.restored_seconds, suffix, cell_seconds(self._rig.events))

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

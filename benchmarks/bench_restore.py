"""Restore efficiency and never-worse: recompute-only, load-only and adaptive, in one run.

For every prefix length and link speed, interleaved rounds measure the three ways on the real model
and the real disk behind a throttled link. ``fluid`` is the bound computed from recompute alone
(seconds of every layer of every tile) and load alone; ``efficiency`` is fluid / adaptive.

    make bench-restore
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop
from corpus import real_tokens
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel, fluid_seconds
from cacheflow.kv import chunk_keys, key_root
from cacheflow.memory import StagingPool
from cacheflow.registry import load_backend
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.restore.saver import Saver
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.types import LayersComputed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.restore import Restoration
    from cacheflow.types import ChunkKey, Event

LENGTHS: Final = [256, 512, 1024, 2048, 4096, 7936]
"""The model's context is 8,192 tokens; 7,936 (31 chunks) leaves room for the suffix."""
RAW: Final = 0.0
SUFFIX: Final = 16
_SLOW: Final = 0.5
"""On slower links than this, load alone is measured on a shorter prefix and scaled."""
_SCALED_TOKENS: Final = 1024


@dataclass
class Point:
    """One (length, link): seconds of every round, by way."""

    tokens: int
    ratio: float
    recompute: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    adaptive: list[float] = field(default_factory=list)
    fluid: list[float] = field(default_factory=list)
    split: list[float] = field(default_factory=list)
    load_is_scaled: bool = False

    def summary_name(self) -> str:
        """The link in words."""
        return "raw disk" if self.ratio == RAW else ratio_name(self.ratio)

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, and how far adaptive is from the better single way."""
        recompute, load, ours = (
            statistics.median(x) for x in (self.recompute, self.load, self.adaptive)
        )
        better = min(recompute, load)
        return {
            "tokens": self.tokens,
            "compute_io": self.summary_name(),
            "recompute_s": recompute,
            "load_s": load,
            "adaptive_s": ours,
            "fluid_s": statistics.median(self.fluid),
            "efficiency": statistics.median(
                f / a for f, a in zip(self.fluid, self.adaptive, strict=True)
            ),
            "speedup": better / ours,
            "excess_ms": (ours - better) * 1e3,
            "allowed_ms": max(0.03 * better, 0.002) * 1e3,
            "recomputed_share": statistics.median(self.split),
            "rounds": len(self.adaptive),
            "spread": (max(self.adaptive) - min(self.adaptive)) / ours,
            "load_is_scaled": self.load_is_scaled,
        }


def ratio_name(ratio: float) -> str:
    """1:3, 1:1, 3:1 ... as compute:I/O."""
    return f"{ratio:g}:1" if ratio >= 1 else f"1:{1 / ratio:g}"


class LayerTimes:
    """Observer: seconds of every (tile, layer) of the last recompute-only run."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, LayersComputed) and not event.is_suffix:
            ends = pairwise((*event.starts, event.stop))
            for layer, (start, stop) in zip(event.layers, ends, strict=True):
                self.cells[event.tile, layer] = stop - start


class LagProbe:
    """Samples how late the event loop wakes."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagProbe:
        self._task = asyncio.get_running_loop().create_task(self._sample())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            self.lags.append(time.perf_counter() - before - 0.002)

    def quantile(self, q: float) -> float:
        ordered = sorted(self.lags)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


class Bench:
    """Holds the engine, the store and warm cost models while points are measured."""

    def __init__(self, engine: Any, store: Any, tokens: Sequence[int]) -> None:
        self.engine = engine
        self.store = store
        self.tokens = list(tokens)
        self.clock = SystemClock()
        self.compute = ComputeModel(*engine.layer_flops)
        self.pool = StagingPool(256 << 20)
        self.keys: tuple[ChunkKey, ...] = chunk_keys(
            key_root(engine.identity), self.tokens, engine.layout.chunk_tokens
        )
        self.lag = LagProbe()
        self._runs = 0

    def bytes_of(self, tokens: int) -> int:
        layout = self.engine.layout
        return tokens // layout.chunk_tokens * int(layout.payload_bytes())

    async def fill(self) -> None:
        """Prefill all tokens on the grid and store their chunks."""
        await self.engine.open("fill", self.tokens)
        scheduler = BatchScheduler(self.compute, self.clock)
        async with Restorer(self.engine, scheduler, {}, self.pool) as restorer:
            request = RestoreRequest("fill", self.tokens, (), self.clock.now())
            await restorer.run(request, load_policy("recompute"))
        saver = Saver(self.engine, {"store": self.store}, self.pool, self.clock, lambda _: None)
        saved = await saver.save("fill", self.keys)
        assert not saved["store"].dropped, saved
        saver.close()
        await self.engine.close("fill")

    async def run(
        self, restorer: Restorer, tokens: int, policy: str, keys: bool = True
    ) -> Restoration:
        """One restore of the first ``tokens`` tokens; nothing of it stays in memory."""
        self._runs += 1
        name = f"run-{self._runs}"
        prompt = self.tokens[: tokens + SUFFIX]
        await self.engine.open(name, prompt)
        chunks = tokens // self.engine.layout.chunk_tokens
        try:
            request = RestoreRequest(
                name, prompt, self.keys[:chunks] if keys else (), self.clock.now()
            )
            return await restorer.run(request, load_policy(policy))
        finally:
            await self.engine.close(name)

    async def recompute(self, tokens: int) -> tuple[float, dict[tuple[int, int], float]]:
        """Seconds and per-cell seconds of recompute alone."""
        times = LayerTimes()
        scheduler = BatchScheduler(self.compute, self.clock)
        async with Restorer(
            self.engine, scheduler, {"none": self.store}, self.pool, observer=times
        ) as restorer:
            result = await self.run(restorer, tokens, "recompute")
        return result.restored_seconds, times.cells

    async def length(self, points: Sequence[Point], rounds: int, tick: Any) -> None:
        """Measure all links of one length: a round is recompute once, then each link's two ways."""
        async with AsyncExitStack() as stack:
            recompute, cells = await self.recompute(points[0].tokens)
            restorers = {}
            for point in points:
                scheduler = BatchScheduler(self.compute, self.clock)
                channels = {"link": self.link(point, recompute)}
                restorer = Restorer(self.engine, scheduler, channels, self.pool)
                restorers[point.ratio] = await stack.enter_async_context(restorer)
            for index in range(rounds):
                if index:
                    recompute, cells = await self.recompute(points[0].tokens)
                for point in points:
                    await self.both(restorers[point.ratio], point, recompute, cells)
                    tick()

    async def both(
        self,
        restorer: Restorer,
        point: Point,
        recompute: float,
        cells: dict[tuple[int, int], float],
    ) -> None:
        """Load alone, then adaptive, over one link."""
        point.recompute.append(recompute)
        point.load.append(await self.load_alone(restorer, point))
        async with self.lag:
            result = await self.run(restorer, point.tokens, "adaptive")
        point.adaptive.append(result.restored_seconds)
        point.split.append(result.recomputed_share)
        point.fluid.append(self.fluid(point, cells, point.load[-1]))

    def link(self, point: Point, recompute: float) -> Any:
        """The store itself, or behind a link that makes compute:I/O the point's ratio."""
        if point.ratio == RAW:
            return self.store
        from cacheflow.storage_backends.throttled import Link, ThrottledBackend

        bandwidth = self.bytes_of(point.tokens) * point.ratio / recompute
        return ThrottledBackend(self.store, Link(bandwidth=bandwidth))

    async def load_alone(self, restorer: Restorer, point: Point) -> float:
        """Seconds of load alone; where that takes minutes, of a shorter prefix, scaled."""
        tokens = point.tokens
        if 0 < point.ratio < _SLOW and tokens > _SCALED_TOKENS:
            point.load_is_scaled = True
            tokens = _SCALED_TOKENS
        result = await self.run(restorer, tokens, "load")
        return result.restored_seconds * point.tokens / tokens

    def fluid(self, point: Point, cells: dict[tuple[int, int], float], load: float) -> float:
        tiles = self.engine.grid.split(0, point.tokens)
        layers = self.engine.layout.num_layers
        order = [(tile, layer) for tile in tiles for layer in range(layers)]
        compute = [cells[tile.index, layer] for tile, layer in order]
        share = [load * tile.width / point.tokens / layers for tile, _ in order]
        return fluid_seconds(compute, share)


def table(points: Sequence[Point]) -> Table:
    """All points, a row each."""
    result = Table(title="restore: seconds until the prefix is ready, medians")
    for name in ("tokens", "compute:I/O", "recompute", "load", "adaptive", "recomputed"):
        result.add_column(name, justify="right")
    for name in ("fluid/measured", "x better single", "excess ms (allowed)"):
        result.add_column(name, justify="right")
    for row in (point.summary() for point in points):
        result.add_row(
            str(row["tokens"]),
            row["compute_io"],
            f"{row['recompute_s']:.3f}",
            f"{row['load_s']:.3f}{'*' if row['load_is_scaled'] else ''}",
            f"{row['adaptive_s']:.3f}",
            f"{row['recomputed_share']:.0%}",
            f"{row['efficiency']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['excess_ms']:+.1f} ({row['allowed_ms']:.1f})",
        )
    return result


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2

    console = Console(stderr=True)
    model = Path(options.model) if options.model else await asyncio.to_thread(prepare_smollm2)
    engine = await TransformersEngine.open_model(
        model, dtype=options.dtype, threads=options.threads, kv_bytes=3 << 30
    )
    longest = max(options.lengths)
    tokens = await asyncio.to_thread(real_tokens, engine.tokenizer, longest + SUFFIX)
    points = [Point(n, r) for n in options.lengths for r in options.ratios]
    plan = [
        (n, options.rounds if n < 4096 else max(1, options.rounds - n // 4096))
        for n in options.lengths
    ]
    nvme = load_backend("nvme")
    with tempfile.TemporaryDirectory(dir=options.store) as folder, Progress(console=console) as bar:
        store = await nvme.open({"path": folder})
        bench = Bench(engine, store, tokens)
        task = bar.add_task(
            "filling the store", total=sum(r for _, r in plan) * len(options.ratios)
        )
        await bench.fill()
        for length, rounds in plan:
            bar.update(task, description=f"{length} tokens")
            own = [point for point in points if point.tokens == length]
            await bench.length(own, rounds, lambda: bar.advance(task))
            if options.verbose:
                for point in own:
                    console.print_json(json.dumps(point.summary()))
        await store.aclose()
    await engine.aclose()
    lag = bench.lag.quantile(0.99) * 1e3
    if options.json:
        rows = [point.summary() | {"raw": asdict(point)} for point in points]
        print(json.dumps({"loop_lag_p99_ms": lag, "points": rows}))
    else:
        Console().print(table(points))
        print(f"event-loop lag p99 during restores: {lag:.2f} ms")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[RAW, 0.1, 1 / 3, 1.0, 3.0, 10.0],
        help="compute:I/O as a number (0: the raw disk)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="fewer from 4k on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="a folder with a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--store", help="where to put the store (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    uvloop.run(main(parse()))

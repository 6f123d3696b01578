"""A batch of prefixes that arrive together, restored on a real engine over one shared link.

Every policy restores the same batch in the same order within a round, so the figures are ratios
within a round. Bounds are computed from what each cell took by recompute alone in the same run and
from the link's bandwidth; a control (one prefix, recomputed) at the start of each round says how
the machine's speed has changed since, and the round's bounds are scaled by it.

    make bench-batch ARGS="--shuffles 10"
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rigs import (
    costs_of,
    fill,
    layer_times,
    model_name,
    model_options,
    numbers,
    opened,
    prompts_of,
    ratio,
    show,
    slowdown,
    spread,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.simulation import FluidRequest, batch_fluid_seconds, mean_lower_bound
from cacheflow.types import LayersComputed, LoadEnded, LoadOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.cli.bench_rig import Prompt, Rig, Run
    from cacheflow.restore import Restorer

LENGTHS = [512, 1024, 2048, 3072, 4096, 5120, 6144, 7936]
QUICK_LENGTHS = [256, 512, 1024, 1536, 2048, 2560, 3072, 3840]
POLICIES = "adaptive:mean,adaptive:tail,cake,cake-sjf,two-pointer"
SINGLE_WAYS = "recompute,load"
CONTROL_TOKENS = 1024
"""About the prefix that measures the machine's speed in every round."""
CONTROL_RUNS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A policy and the objective of its scheduler, as ``policy`` or ``policy:objective``."""

    name: str

    @property
    def policy(self) -> str:
        return self.name.partition(":")[0]

    @property
    def objective(self) -> str:
        return self.name.partition(":")[2] or "tail"


@dataclass
class Round:
    """One order of arrival: every way's run, and the bounds scaled to the machine's speed."""

    order: list[int]
    control: float
    makespan_bound: float = 0.0
    mean_bound: float = 0.0
    runs: dict[str, Run] = field(default_factory=dict)


class Batch:
    """Rounds on one engine; each way keeps its own restorer, so that what it learns stays."""

    def __init__(self, rig: Rig, prompts: Sequence[Prompt], balance: float) -> None:
        self.rig = rig
        self.prompts = list(prompts)
        self.balance = balance
        self.bandwidth = 0.0
        self.rounds: list[Round] = []
        self.costs: list[FluidRequest] = []
        """Of each request, in the order in which the first round recomputed them."""
        self.alone: Run | None = None
        """That recompute."""
        self._restorers: dict[str, Restorer] = {}
        self._stack = AsyncExitStack()

    async def prepare(self, order: Sequence[int], ways: Sequence[Way]) -> None:
        """Recompute alone in the first round's order; then the link and every way's restorer."""
        alone = await self._stack.enter_async_context(self.rig.restorer({}))
        self._restorers["control"] = alone
        await self._control()  # not counted: the engine warms up
        first = Round(list(order), await self._control())
        run = self.alone = await self.rig.together(alone, self._in(order), "recompute")
        if any(way.name == "recompute" for way in ways):
            first.runs["recompute"] = run
        nbytes = sum(self.rig.nbytes(prompt.prefix) for prompt in self.prompts)
        seconds = max(one.restored_seconds for one in run.restorations)
        self.bandwidth = nbytes * self.balance / seconds
        self.costs = costs_of(self.rig, run, self.bandwidth)
        self.rounds.append(first)
        link = await self.rig.open_link(self.bandwidth)
        self._stack.push_async_callback(link.aclose)
        for way in ways:
            made = self.rig.restorer({"link": link}, way.objective)
            self._restorers[way.name] = await self._stack.enter_async_context(made)
            await self.rig.alone(made, self._shortest, "load")  # its channel model is warm then

    async def round(
        self, order: Sequence[int], ways: Sequence[Way], tell: Callable[[], None]
    ) -> None:
        """One order of arrival, every way once."""
        current = self.rounds[-1]
        if current.makespan_bound:  # the first round was begun by ``prepare``
            current = Round(list(order), await self._control())
            self.rounds.append(current)
        drift = current.control / self.rounds[0].control
        costs = [_scaled(cost, drift) for cost in self.costs]
        current.makespan_bound = batch_fluid_seconds(costs)
        current.mean_bound = mean_lower_bound(costs)
        for way in ways:
            if way.name not in current.runs:
                restorer = self._restorers[way.name]
                current.runs[way.name] = await self.rig.together(
                    restorer, self._in(order), way.policy
                )
            tell()

    def slowdown(self, one: Round, run: Run) -> float:
        """How much longer compute took than alone, drift aside: see :func:`rigs.slowdown`."""
        assert self.alone is not None
        alone = dict(zip(self.rounds[0].order, self.alone.ids, strict=True))
        pairs = [
            (layer_times(run.events, name), layer_times(self.alone.events, alone[prompt]))
            for prompt, name in zip(one.order, run.ids, strict=True)
        ]
        return slowdown(pairs) * self.rounds[0].control / one.control

    async def aclose(self) -> None:
        """Close the restorers and the link."""
        await self._stack.aclose()

    @property
    def _shortest(self) -> Prompt:
        return min(self.prompts, key=lambda prompt: prompt.prefix)

    def _in(self, order: Sequence[int]) -> list[Prompt]:
        return [self.prompts[i] for i in order]

    async def _control(self) -> float:
        prompt = min(self.prompts, key=lambda one: abs(one.prefix - CONTROL_TOKENS))
        times = []
        for _ in range(CONTROL_RUNS):
            result = await self.rig.alone(self._restorers["control"], prompt, "recompute")
            times.append(result.restored_seconds)
        return statistics.median(times)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, summed up."""
    ways = [Way(name) for name in options.policies.split(",") if name]
    once = {name for name in options.once.split(",") if name}
    orders = _orders(len(options.lengths), options.shuffles)
    async with opened(options) as rig:
        prompts = await prompts_of(rig, options.lengths, SUFFIX_TOKENS)
        with progress() as bar:
            await fill(rig, prompts, bar)
            task = bar.add_task("restoring", total=len(ways) * len(orders))
            batch = Batch(rig, prompts, options.ratio)
            try:
                await batch.prepare(orders[0], ways)
                for number, order in enumerate(orders):
                    now = [way for way in ways if not number or way.name not in once]
                    random.Random(number).shuffle(now)
                    await batch.round(order, now, lambda: bar.advance(task))
            finally:
                await batch.aclose()
    return summary(batch, options, ways)


def _scaled(cost: FluidRequest, factor: float) -> FluidRequest:
    """The same on a machine that takes ``factor`` times as long to compute."""
    compute = tuple(seconds * factor for seconds in cost.compute)
    return FluidRequest(compute, cost.load, cost.fixed * factor)


def _orders(count: int, shuffles: int) -> list[list[int]]:
    """The same orders on every machine: shuffle ``i`` depends on ``i`` only."""
    return [random.Random(1000 + i).sample(range(count), count) for i in range(shuffles)]


def summary(batch: Batch, options: argparse.Namespace, ways: Sequence[Way]) -> dict[str, Any]:
    """Medians and spreads of every way, its ratios to the others, and every single run."""
    best = [min(run.last for run in one.runs.values()) for one in batch.rounds]
    return {
        "model": model_name(options),
        "lengths": options.lengths,
        "compute_io": options.ratio,
        "bandwidth": batch.bandwidth,
        "drift": [one.control / batch.rounds[0].control for one in batch.rounds],
        "makespan_bound_s": [one.makespan_bound for one in batch.rounds],
        "mean_bound_s": [one.mean_bound for one in batch.rounds],
        "ways": {way.name: _figures(batch, way.name, best) for way in ways},
        "rounds": [_raw(one) for one in batch.rounds],
    }


def _figures(batch: Batch, name: str, best: Sequence[float]) -> dict[str, Any]:
    mine = [(i, one) for i, one in enumerate(batch.rounds) if name in one.runs]
    runs = [one.runs[name] for _, one in mine]
    others = {other for one in batch.rounds for other in one.runs} - {name}
    versus = {}
    for other in sorted(others):
        shared = [one.runs for _, one in mine if other in one.runs]
        if shared:
            versus[other] = spread([both[name].mean / both[other].mean for both in shared])
    return {
        "rounds": len(runs),
        "mean_ttft_s": spread([run.mean for run in runs]),
        "mean_first_token_s": spread([_mean(run.first_tokens) for run in runs]),
        "last_s": spread([run.last for run in runs]),
        "last_to_best": spread([one.runs[name].last / best[i] for i, one in mine]),
        "efficiency": spread([one.makespan_bound / one.runs[name].last for _, one in mine]),
        "mean_to_bound": spread([one.runs[name].mean / one.mean_bound for _, one in mine]),
        "compute_slowdown": spread([batch.slowdown(one, one.runs[name]) for _, one in mine]),
        "compute_busy": spread([_compute_busy(run) for run in runs]),
        "link_busy": spread([_link_busy(batch, run) for run in runs]),
        "mean_ttft_to": versus,
    }


def _compute_busy(run: Run) -> float:
    """Share of the makespan in which compute did cells of prefixes or suffixes."""
    done = [event for event in run.events if isinstance(event, LayersComputed)]
    return sum(event.stop - event.starts[0] for event in done) / run.last


def _link_busy(batch: Batch, run: Run) -> float:
    """Share of the makespan that the bytes which were used kept the link busy."""
    loads = [event for event in run.events if isinstance(event, LoadEnded)]
    used = sum(event.nbytes for event in loads if event.outcome is LoadOutcome.PUBLISHED)
    return used / batch.bandwidth / run.last


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _raw(one: Round) -> dict[str, Any]:
    runs = {
        name: {
            "ttft_s": run.ttft,
            "first_token_s": run.first_tokens,
            "restored_s": [each.restored_seconds for each in run.restorations],
            "recomputed_share": [each.recomputed_share for each in run.restorations],
        }
        for name, run in one.runs.items()
    }
    return {"order": one.order, "control_s": one.control, "runs": runs}


def tell(found: dict[str, Any]) -> None:
    """The table."""
    first = next(iter(found["ways"]))
    rows = []
    for name, way in found["ways"].items():
        mean, versus = way["mean_ttft_s"], way["mean_ttft_to"].get(first)
        busy = f"{way['compute_busy']['median']:.2f}/{way['link_busy']['median']:.2f}"
        rows.append(
            (
                name,
                f"{mean['median']:.4g}",
                f"{(mean['max'] - mean['min']) / mean['median']:.0%}",
                f"{1 - 1 / versus['median']:.0%}" if versus else "",
                f"{way['last_s']['median']:.4g}",
                f"{way['last_to_best']['median']:.3f}",
                f"{way['efficiency']['median']:.3f}",
                busy,
                f"{way['compute_slowdown']['median']:.2f}",
                str(way["rounds"]),
            )
        )
    heads = ("way", "mean", "spread", "below", "last", "/best", "eff.", "c/l busy", "slow", "n")
    bound = spread(found["mean_bound_s"])["median"], spread(found["makespan_bound_s"])["median"]
    caption = (
        f"seconds, medians over n shuffles; mean: of the TTFTs. below: how far the mean of {first} "
        f"is below this way's in the same round. No order beats a mean of {bound[0]:.2f} or a last "
        f"of {bound[1]:.2f} (eff.: that / last). slow: compute's time for its cells by that of "
        f"recompute alone. Control, first round = 1: {min(found['drift']):.3f} "
        f"to {max(found['drift']):.3f}."
    )
    show(f"{len(found['lengths'])} prefixes together, {found['model']}", heads, rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--lengths", type=numbers, help="prefix lengths, multiples of 256")
    parser.add_argument("--shuffles", type=int, default=3, help="orders of arrival, fixed")
    both = f"{POLICIES},{SINGLE_WAYS}"
    parser.add_argument("--policies", default=both, help=f"policy[:objective] (default: {both})")
    once = "ways that run in the first shuffle only: their order matters to nobody else"
    parser.add_argument("--once", default=SINGLE_WAYS, help=f"{once} (default: {SINGLE_WAYS})")
    parser.add_argument("--ratio", type=ratio, default=1.0, help="compute:I/O of the whole batch")
    options = parser.parse_args()
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

"""The simulator against the real engine: predicted and measured TTFT of the same restores.

First every prefix is recomputed alone, once: what a layer of each tile takes is all the simulator
gets to know, beside the link's nominal bandwidth. Then batches of one to four prefixes are restored
for real, over links of several speeds and by several policies, and each is predicted by running
the same scheduler in virtual time.

    make bench-simulation
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rigs import layer_times, model_options, numbers, opened, prompts_of, ratio, show, start

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.costs import ComputeModel
from cacheflow.restore import RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.links import SerialLink
from cacheflow.simulation.node import Node
from cacheflow.types import Coverage, Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.cli.bench_rig import Prompt, Rig, Run

LENGTHS = [512, 1024, 1536, 2048, 3072, 4096]
QUICK_LENGTHS = [512, 768, 1024, 1536, 2048, 3072]
POLICIES = "adaptive,cake,two-pointer,load,recompute"
RATIOS = (1 / 3, 1.0, 3.0)
LARGEST_BATCH = 4


class Costs:
    """Seconds of a layer by tile, as recompute alone took them."""

    def __init__(self) -> None:
        self.restored: list[float] = []
        """Seconds until each prefix was recomputed."""
        self.total = 0.0
        """Seconds of all prefixes and suffixes."""
        self._layers = 0.0
        self._seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._means: dict[tuple[int, int], float] = {}

    def add(self, rig: Rig, prompt: Prompt, run: Run) -> None:
        """Take in every layer of a run that recomputed ``prompt`` alone."""
        grid = rig.engine.grid
        prefix = {tile.index: tile for tile in grid.split(0, prompt.prefix)}
        suffix = {tile.index: tile for tile in grid.split(prompt.prefix, len(prompt.tokens))}
        for time in layer_times(run.events, run.ids[0]):
            tile = (suffix if time.is_suffix else prefix)[time.tile]
            self._seconds[tile.start, tile.stop].append(time.seconds)
            self._layers += time.seconds
        self.restored.append(run.restorations[0].restored_seconds)
        self.total += run.last
        self._means = {key: statistics.fmean(each) for key, each in self._seconds.items()}

    @property
    def unseen(self) -> float:
        """Share of recompute's time that is in no layer: between tiles, before the first one."""
        return 1 - self._layers / self.total

    def layer_seconds(self, tile: Tile, now: float = 0.0) -> float:
        """The mean, since sums of layers are predicted; KeyError for a tile never measured."""
        return self._means[tile.start, tile.stop]

    def model(self, rig: Rig) -> ComputeModel:
        """What a scheduler has learned that saw these layers, widest context last."""
        model = ComputeModel(*rig.engine.layer_flops)
        for (begin, stop), seconds in sorted(self._means.items()):
            if stop - begin > SUFFIX_TOKENS:
                model.observe(Tile(rig.engine.grid.index_at(begin), begin, stop), seconds)
        return model


@dataclass(frozen=True, slots=True)
class Case:
    """One real run and what the simulator said of it; entry ``i`` is the ``i``-th prompt."""

    policy: str
    ratio: float
    lengths: tuple[int, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    @property
    def errors(self) -> list[float]:
        """``predicted / measured - 1`` of every request."""
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]


def predict(
    rig: Rig, costs: Costs, prompts: Sequence[Prompt], policy: str, bandwidth: float
) -> tuple[float, ...]:
    """TTFT of each prompt in virtual time, all arriving at 0 in this order."""
    loop, layout = EventLoop(), rig.engine.layout
    scheduler = BatchScheduler(costs.model(rig), loop)
    links = {"link": SerialLink(loop, bandwidth)}
    node = Node(loop, scheduler, costs.layer_seconds, links)
    everything = (1 << layout.num_layers) - 1
    records = []
    for i, prompt in enumerate(prompts):
        request = RestoreRequest(str(i), prompt.tokens, prompt.keys, i * 1e-6)
        coverage = Coverage("link", (everything,) * len(prompt.keys), layout.layer_stride())
        stored = [] if policy == "recompute" else [coverage]
        spec = request.spec(layout, rig.engine.grid)
        records.append(node.admit(spec, load_policy(policy), stored))
    loop.run()
    return tuple(record.ttft for record in records)


def plan(options: argparse.Namespace) -> list[tuple[str, float, list[int]]]:
    """The same cases on every machine: policy, compute:I/O, indices of the prompts in order."""
    chance = random.Random(options.seed)
    policies = [name for name in options.policies.split(",") if name]
    count = len(options.lengths)
    largest = min(LARGEST_BATCH, count)
    return [
        (
            policies[i % len(policies)],
            chance.choice(options.ratios),
            chance.sample(range(count), 1 + i // len(policies) % largest),
        )
        for i in range(options.runs)
    ]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every case, for real and in virtual time."""
    cases = plan(options)
    async with opened(options) as rig:
        prompts = await prompts_of(rig, options.lengths, SUFFIX_TOKENS)
        with progress() as bar:
            tiles = sum(len(rig.engine.grid.split(0, prompt.prefix)) for prompt in prompts)
            filling = bar.add_task("filling the store", total=tiles)
            await rig.fill(prompts, lambda: bar.advance(filling))
            task = bar.add_task("restoring", total=len(cases))
            await _learn(rig, prompts)  # not counted: the engine warms up
            costs = await _learn(rig, prompts)
            done = await _all(rig, prompts, costs, cases, lambda: bar.advance(task))
            after = await _learn(rig, prompts)
    return summary(options, done, after.total / costs.total, costs.unseen)


async def _learn(rig: Rig, prompts: Sequence[Prompt]) -> Costs:
    """Recompute every prompt alone."""
    costs = Costs()
    async with rig.restorer({}) as alone:
        for prompt in prompts:
            costs.add(rig, prompt, await rig.together(alone, [prompt], "recompute"))
    return costs


async def _all(
    rig: Rig,
    prompts: Sequence[Prompt],
    costs: Costs,
    cases: Sequence[tuple[str, float, list[int]]],
    tell: Callable[[], None],
) -> list[Case]:
    done = []
    for policy, balance, chosen in cases:
        batch = [prompts[i] for i in chosen]
        nbytes = sum(rig.nbytes(prompt.prefix) for prompt in batch)
        bandwidth = nbytes * balance / sum(costs.restored[i] for i in chosen)
        link = await rig.open_link(bandwidth)
        async with rig.restorer({"link": link}) as restorer:
            run = await rig.together(restorer, batch, policy)
        await link.aclose()
        predicted = predict(rig, costs, batch, policy, bandwidth)
        lengths = tuple(prompt.prefix for prompt in batch)
        done.append(Case(policy, balance, lengths, run.ttft, predicted))
        tell()
    return done


def summary(
    options: argparse.Namespace, cases: Sequence[Case], drift: float, unseen: float
) -> dict[str, Any]:
    """Errors of all requests, of runs' means, and by policy.

    ``drift``: seconds of recompute alone after all cases by those before; ``unseen``: see there.
    """
    policies = dict.fromkeys(case.policy for case in cases)
    means = [_mean(case.predicted) / _mean(case.measured) - 1 for case in cases]
    return {
        "model": options.model or ("random, 8 x 256" if options.quick else "SmolLM2-135M"),
        "drift": drift,
        "unseen_share": unseen,
        "runs": len(cases),
        "requests": sum(len(case.measured) for case in cases),
        "by_request": _errors([error for case in cases for error in case.errors]),
        "by_run": _errors(means),
        "by_policy": {
            name: _errors([e for case in cases if case.policy == name for e in case.errors])
            for name in policies
        },
        "cases": [
            {
                "policy": case.policy,
                "compute_io": case.ratio,
                "lengths": case.lengths,
                "measured_s": case.measured,
                "predicted_s": case.predicted,
            }
            for case in cases
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _errors(errors: Sequence[float]) -> dict[str, float]:
    absolute = sorted(abs(error) for error in errors)
    return {
        "count": len(errors),
        "median_abs": statistics.median(absolute),
        "p90_abs": absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))],
        "max_abs": absolute[-1],
        "median": statistics.median(errors),
    }


def tell(found: dict[str, Any]) -> None:
    """Every run, then the errors."""
    rows = []
    for case in found["cases"]:
        pairs = zip(case["predicted_s"], case["measured_s"], strict=True)
        worst = max((p / m - 1 for p, m in pairs), key=abs)
        rows.append(
            (
                case["policy"],
                f"{case['compute_io']:.2f}",
                "+".join(map(str, case["lengths"])),
                f"{_mean(case['predicted_s']):.3f}",
                f"{_mean(case['measured_s']):.3f}",
                f"{_mean(case['predicted_s']) / _mean(case['measured_s']) - 1:+.1%}",
                f"{worst:+.1%}",
            )
        )
    heads = ("policy", "c:io", "prefixes", "predicted", "measured", "error", "worst")
    request, run = found["by_request"], found["by_run"]
    caption = f"mean TTFT in seconds; worst: the request with the largest error; {found['runs']} "
    caption += (
        f"runs, {found['requests']} requests: absolute error median {request['median_abs']:.1%}, "
        f"P90 {request['p90_abs']:.1%} by request; {run['median_abs']:.1%}, {run['p90_abs']:.1%} "
        f"by run. Recompute alone after all runs took {found['drift']:.3f} of what it took before, "
        f"{found['unseen_share']:.1%} of it in no layer"
    )
    show(f"simulated against real, {found['model']}", heads, rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--lengths", type=numbers, help="prefix lengths, multiples of 256")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="of the cases")
    parser.add_argument("--policies", default=POLICIES, help=f"(default: {POLICIES})")
    listed = "compute:I/O of the batch, one drawn a run (default: 1:3,1:1,3:1)"
    parser.add_argument("--ratios", type=_ratios, default=list(RATIOS), help=listed)
    options = parser.parse_args()
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    return options


def _ratios(text: str) -> list[float]:
    return [ratio(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

"""The simulator against the real engine: predicted and measured TTFT of the same restores.

First every prefix is recomputed alone and one is loaded alone: what a layer of each tile takes,
what a lookup takes and how much longer a load takes than its bytes is all the simulator gets to
know, beside the link's nominal bandwidth. Then batches of one to four prefixes are restored for
real, over links of several speeds and by several policies, and each is predicted by running the
same scheduler in virtual time. A control (one prefix, recomputed) before each run says how the
machine's speed has changed since; errors are given with and without that correction.

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

from rigs import (
    layer_times,
    model_name,
    model_options,
    numbers,
    opened,
    prompts_of,
    ratio,
    show,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.costs import ComputeModel
from cacheflow.restore import RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.simulation import EventLoop, Node, SerialLink
from cacheflow.types import Coverage, LookedUp, Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.cli.bench_rig import Prompt, Rig, Run
    from cacheflow.restore import Restorer
    from cacheflow.simulation import Record

LENGTHS = [512, 1024, 1536, 2048, 3072, 4096]
QUICK_LENGTHS = [512, 768, 1024, 1536, 2048, 3072]
POLICIES = "adaptive,cake,two-pointer,load,recompute"
RATIOS = (1 / 3, 1.0, 3.0)
LARGEST_BATCH = 4
CONTROL_TOKENS = 1024
"""About the prefix that measures the machine's speed before every run."""


class Costs:
    """What was measured before the runs that are predicted."""

    def __init__(self) -> None:
        self.restored: list[float] = []
        """Seconds until each prefix was recomputed."""
        self.lookup = 0.0
        """Seconds until a tier has answered."""
        self.latency = 0.0
        """Seconds that a load takes beyond those of its bytes: reads, checksums, copies."""
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
        self.restored.append(run.restorations[0].restored_seconds)
        self._means = {key: statistics.fmean(each) for key, each in self._seconds.items()}

    def add_load(self, run: Run, byte_seconds: float) -> None:
        """Take in a run that loaded one prompt alone, the bytes of which take ``byte_seconds``."""
        asked = [event.stop - event.start for event in run.events if isinstance(event, LookedUp)]
        self.lookup = max(asked)
        seconds = run.restorations[0].restored_seconds
        self.latency = max(0.0, seconds - self.lookup - byte_seconds)

    def layer_seconds(self, tile: Tile) -> float:
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
    uncorrected: tuple[float, ...]
    """Predicted as if the machine had kept its speed."""
    drift: float
    """The control's seconds by those of the first one."""

    @property
    def errors(self) -> list[float]:
        """``predicted / measured - 1`` of every request."""
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def uncorrected_errors(self) -> list[float]:
        """The same without the correction."""
        return [p / m - 1 for p, m in zip(self.uncorrected, self.measured, strict=True)]


def predict(
    rig: Rig,
    costs: Costs,
    prompts: Sequence[Prompt],
    policy: str,
    bandwidth: float,
    drift: float = 1.0,
) -> tuple[float, ...]:
    """TTFT of each prompt in virtual time, all arriving at 0 in this order.

    ``drift``: how much longer compute takes than when the costs were measured.
    """
    loop, layout = EventLoop(), rig.engine.layout
    scheduler = BatchScheduler(costs.model(rig), loop)
    links = {"link": SerialLink(loop, bandwidth, costs.latency)}
    node = Node(loop, scheduler, lambda tile, now: costs.layer_seconds(tile) * drift, links)
    everything = (1 << layout.num_layers) - 1
    asks = load_policy(policy).load(0.0, 1.0)
    records: list[Record] = []

    def arrive(request: RestoreRequest) -> None:
        coverage = Coverage("link", (everything,) * len(request.keys), layout.layer_stride())
        spec = request.spec(layout, rig.engine.grid)
        records.append(node.admit(spec, load_policy(policy), [coverage] if asks else []))

    for i, prompt in enumerate(prompts):
        request = RestoreRequest(str(i), prompt.tokens, prompt.keys, i * 1e-6)
        loop.at(request.arrival + (costs.lookup if asks else 0.0), arrive, request)
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
            done = await _all(rig, prompts, cases, lambda: bar.advance(task))
    return summary(options, done)


async def _all(
    rig: Rig,
    prompts: Sequence[Prompt],
    cases: Sequence[tuple[str, float, list[int]]],
    tell: Callable[[], None],
) -> list[Case]:
    async with rig.restorer({}) as alone:
        await _control(rig, prompts, alone)  # not counted: the engine warms up
        costs, first = await _learn(rig, prompts, alone), await _control(rig, prompts, alone)
        done = []
        for policy, balance, chosen in cases:
            batch = [prompts[i] for i in chosen]
            drift = await _control(rig, prompts, alone) / first
            nbytes = sum(rig.nbytes(prompt.prefix) for prompt in batch)
            bandwidth = nbytes * balance / sum(costs.restored[i] for i in chosen)
            run = await _restore(rig, batch, policy, bandwidth)
            done.append(
                Case(
                    policy,
                    balance,
                    tuple(prompt.prefix for prompt in batch),
                    run.ttft,
                    predict(rig, costs, batch, policy, bandwidth, drift),
                    predict(rig, costs, batch, policy, bandwidth),
                    drift,
                )
            )
            tell()
    return done


async def _learn(rig: Rig, prompts: Sequence[Prompt], alone: Restorer) -> Costs:
    """Recompute every prompt alone, and load one over a link as fast as that."""
    costs = Costs()
    for prompt in prompts:
        costs.add(rig, prompt, await rig.together(alone, [prompt], "recompute"))
    nbytes = rig.nbytes(prompts[0].prefix)
    run = await _restore(rig, prompts[:1], "load", nbytes / costs.restored[0])
    costs.add_load(run, costs.restored[0])
    return costs


async def _control(rig: Rig, prompts: Sequence[Prompt], alone: Restorer) -> float:
    prompt = min(prompts, key=lambda one: abs(one.prefix - CONTROL_TOKENS))
    return (await rig.alone(alone, prompt, "recompute")).restored_seconds


async def _restore(rig: Rig, batch: Sequence[Prompt], policy: str, bandwidth: float) -> Run:
    link = await rig.open_link(bandwidth)
    try:
        async with rig.restorer({"link": link}) as restorer:
            return await rig.together(restorer, batch, policy)
    finally:
        await link.aclose()


def summary(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, Any]:
    """Errors of all requests, of runs' means, and by policy."""
    policies = dict.fromkeys(case.policy for case in cases)
    means = [_mean(case.predicted) / _mean(case.measured) - 1 for case in cases]
    return {
        "model": model_name(options),
        "drift": [case.drift for case in cases],
        "runs": len(cases),
        "requests": sum(len(case.measured) for case in cases),
        "by_request": _errors([error for case in cases for error in case.errors]),
        "by_run": _errors(means),
        "uncorrected": _errors([error for case in cases for error in case.uncorrected_errors]),
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
                "uncorrected_s": case.uncorrected,
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
    caption = (
        f"mean TTFT in seconds; worst: the request with the largest error. {found['runs']} runs, "
        f"{found['requests']} requests; absolute error, median and P90: by request "
        f"{_pair(request)}, by run {_pair(run)}; without the control's correction "
        f"{_pair(found['uncorrected'])}. Control, first = 1: {min(found['drift']):.3f} to "
        f"{max(found['drift']):.3f}."
    )
    show(f"simulated against real, {found['model']}", heads, rows, caption)


def _pair(errors: dict[str, float]) -> str:
    return f"{errors['median_abs']:.1%} and {errors['p90_abs']:.1%}"


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

"""Policies against each other, bounds and published figures, in virtual time.

make bench-policies                           (ARGS="--only open,map" to choose, ARGS=--json)

The scheduler and its policies are the ones that serve; GPUs, models and links are the presets of
``cacheflow.simulation``. Every figure follows from the seeds. What other systems do is stood for by
a policy here (vLLM and SGLang: ``recompute``; LMCache and SGLang HiCache: ``load``); none was run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, ClassVar, Final

from cacheflow.costs import ChannelProfile, ComputeModel
from cacheflow.scheduling import POLICIES, BatchScheduler, Policy
from cacheflow.scheduling.order import FirstCome
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.scheduling.policies.staircase import best_staircase
from cacheflow.scheduling.policies.two_pointer import TwoPointer
from cacheflow.simulation import (
    Channel,
    EventLoop,
    Job,
    Lengths,
    Node,
    Scenario,
    SerialLink,
    Synthetic,
    batch_fluid_seconds,
    load_link,
    load_machine,
    mean_gap,
    mean_lower_bound,
    poisson,
    simulate,
    synthetic,
)
from cacheflow.simulation.jobs import WIDE
from cacheflow.simulation.maps import win_map
from cacheflow.simulation.presets import LinkPreset
from cacheflow.simulation.results import Quantiles, summarise
from cacheflow.types import Tile, TileGrid

if TYPE_CHECKING:
    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.simulation import FluidRequest, Record, Summary
    from cacheflow.types import Load, RequestSpec

Cell = str | float | int
FINE: Final = TileGrid()
"""The grid that serves: 512, 512, 1024, then 2048."""
LLAMA: Final = "h100:llama-3.1-8b"
QWEN: Final = "h100:qwen3-8b"
EIGHT: Final = Lengths("fixed", (512, 1024, 2048, 3072, 4096, 5120, 6144, 8192))


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """What an experiment found. The last cell of a row is its verdict, where there is one."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As a section of a document."""
        lines = [f"### {self.title}", ""]
        lines += [_line(self.heads), _line(["---"] * len(self.heads))]
        lines += [_line([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join([*lines, *(("", self.note) if self.note else ()), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.3f}"


def verdict(*holds: bool) -> str:
    """Whether every one ``holds``."""
    return "kept" if all(holds) else "**not kept**"


def percent(share: float) -> str:
    """``0.123`` as ``12.3 %``."""
    return f"{100 * share:.1f} %"


def tokens(count: int) -> str:
    """``4096`` as ``4k``."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``trouble``: ``slow`` halves the link's speed every other 5 s, ``hang`` lets one
    load in 50 never answer (given up after half a second); cost models know of neither."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    policy: str | type[Policy]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave; ``ttft`` in seconds, in the order of the first tokens."""

    summary: Summary
    ttft: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.summary.ttft.mean


Runner = Callable[[Sequence[Case]], list[Outcome]]


def run(case: Case) -> Outcome:
    """A policy by name goes through ``simulate``, one made here through :func:`drive`."""
    if isinstance(case.policy, str) and not case.trouble:
        found = simulate(case.scenario, Synthetic("jobs", case.jobs), case.policy)
        return Outcome(found.summary, tuple(record.ttft for record in found.records))
    return drive(case)


def drive(case: Case) -> Outcome:
    """As ``simulate`` does for one GPU, but with any policy and with trouble."""
    scenario, loop = case.scenario, EventLoop()
    compute = ComputeModel(*scenario.machine.block_flops)
    scheduler = BatchScheduler(compute, loop, objective=scenario.objective)
    _warm(scenario, scheduler, compute)
    make = POLICIES[case.policy] if isinstance(case.policy, str) else case.policy
    speed = _every_other if case.trouble == "slow" else None
    node = Node(
        loop,
        scheduler,
        scenario.machine.block_seconds,
        {
            each.name: SerialLink(loop, each.link.bandwidth, each.link.latency, speed=speed)
            for each in scenario.channels
        },
        fate=_hangs if case.trouble == "hang" else None,
        load_deadline=0.5,
    )
    placement = scenario.placement(named=False)
    done: list[tuple[Record, FluidRequest]] = []

    def arrive(job: Job) -> None:
        placed = placement.place(job, 0)
        record = node.admit(placed.spec, make(), placed.coverage)
        done.append((record, scenario.fluid(placed)))

    for job in case.jobs:
        loop.at(job.arrival, arrive, job)
    loop.run()
    if node.unfinished:
        raise RuntimeError(f"{case.policy}: {node.unfinished} requests never ended")
    summary = summarise(str(case.policy), [node], done, scenario.machine.layer_blocks)
    return Outcome(summary, tuple(record.ttft for record, _ in done))


def _warm(scenario: Scenario, scheduler: BatchScheduler, compute: ComputeModel) -> None:
    width = scenario.grid.tail
    for first in (0, 2, 8, 1, 4):
        tile = Tile(first, first * width, (first + 1) * width)
        compute.observe(tile, scenario.machine.block_seconds(tile))
    for each in scenario.channels:
        unit = float(scenario.machine.block_bytes(width))
        profile = ChannelProfile(each.link.latency, 1 / each.link.bandwidth, unit)
        scheduler.channel(each.name).prime(profile)


def _every_other(now: float) -> float:
    return 0.5 if int(now / 5) % 2 else 1.0


def _hangs(load: Load, now: float) -> bool | None:
    return None if load.id % 50 == 0 else True


def setting(preset: str, *links: str, layers: int = 1, **more: object) -> Scenario:
    """Cells of one layer on the grid that serves, unless ``more`` says otherwise."""
    fields: dict[str, object] = {"chunk_tokens": 256, "grid": FINE, **more}
    machine = load_machine(preset, layers_per_block=layers)
    return Scenario(machine, tuple(Channel(load_link(link)) for link in links), **fields)  # type: ignore[arg-type]


def single(prefix: int, suffix: int = 256) -> tuple[Job, ...]:
    """One request on an idle machine."""
    return (Job("r", 0.0, prefix + suffix, prefix_tokens=prefix),)


def balanced(scenario: Scenario, prefix: int, ratio: float = 1.0) -> Scenario:
    """The same with one link over which ``prefix`` tokens load ``ratio`` times as fast as they
    are recomputed."""
    machine = scenario.machine
    layer = sum(machine.block_seconds(tile) for tile in scenario.grid.split(0, prefix))
    rate = machine.model.token_bytes * prefix * ratio / (layer * machine.layer_blocks)
    link = LinkPreset("link", rate, 50e-6, "by compute:I/O")
    return replace(scenario, channels=(Channel(link),))


# -- open arrivals ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """A stream of requests. ``requests``: how many a run."""

    name: str
    preset: str
    link: str
    tokens: int
    suffix: int
    layers: int
    requests: int

    def case(self, policy: str | type[Policy], load: float, objective: str, seed: int) -> Case:
        """The same requests at the same moments for every policy of a seed."""
        scenario = setting(
            self.preset, self.link, layers=self.layers,
            chunk_tokens=512, grid=WIDE, objective=objective,
        )  # fmt: skip
        lengths = Lengths("lognormal", (float(self.tokens), 1.0))
        jobs = synthetic(
            self.requests, lengths, chunk_tokens=512, suffix_tokens=self.suffix, seed=seed
        )
        return Case(scenario, tuple(poisson(jobs, mean_gap(scenario, jobs, load), seed)), policy)


MAIN: Final = Open("8B on an H100, 25 Gbps, 15k", LLAMA, "25gbps", 15000, 256, 4, 100)
OPENS: Final = (
    MAIN,
    Open("8B on an A100, 10 Gbps, 8k, suffix 512", "a100:qwen3-8b", "10gbps", 8000, 512, 4, 100),
    Open("70B on four H100, 100 Gbps, 15k", "h100x4:llama-3.1-70b", "100gbps", 15000, 256, 10, 80),
)
MEAN_LIMITS: Final = {0.65: (0.75, 0.55), 0.85: (0.60, 0.40)}
SEEDS: Final = 20


def open_arrivals(run_all: Runner) -> list[Table]:
    """Mean and tail of a stream at several loads, paired by seed."""
    return [_open_mean(run_all), _open_tail(run_all)]


def _open_mean(run_all: Runner) -> Table:
    rows: list[tuple[Cell, ...]] = []
    names, seeds = ("adaptive", "cake", "two-pointer"), range(5)
    for stream in OPENS:
        for load, (cake, pointer) in MEAN_LIMITS.items():
            cases = [stream.case(name, load, "mean", seed) for name in names for seed in seeds]
            found = run_all(cases)
            ours, first, v1 = (
                fmean(each.mean for each in found[i : i + len(seeds)])
                for i in range(0, len(found), len(seeds))
            )
            kept = verdict(ours <= cake * first, ours <= pointer * v1)
            limits = f"{cake:.2f}, {pointer:.2f}"
            row = (stream.name, load, ours, first, v1, ours / first, ours / v1, limits, kept)
            rows.append(row)
    heads = ("setting", "load", "adaptive, s", "cake, s", "two-pointer, s", "/ cake",
             "/ two-pointer", "limits", "verdict")  # fmt: skip
    note = f"Mean TTFT over {len(seeds)} seeds. Load: share of what compute and link carry together."
    return Table("Open arrivals, objective mean", heads, tuple(rows), note)


def _open_tail(run_all: Runner) -> Table:
    rows = []
    for stream in OPENS:
        for load in (0.3, 0.5, 0.65, 0.85) if stream is MAIN else (0.5, 0.65, 0.85):
            cases = [
                stream.case(name, load, "tail", seed)
                for name in ("adaptive", "cake")
                for seed in range(SEEDS)
            ]
            found = run_all(cases)
            rows.append(_tail_row(stream.name, load, found[:SEEDS], found[SEEDS:]))
    heads = ("setting", "load", "mean / cake", "P90 / cake", "P99 / cake", "longest / cake",
             "highest mean of a seed", "limits", "verdict")  # fmt: skip
    note = (
        f"{SEEDS} paired seeds; quantiles of all their requests together; highest mean of a seed: "
        "the pair in which adaptive's mean is highest by cake's."
    )
    return Table("Open arrivals, objective tail", heads, tuple(rows), note)


def _tail_row(
    name: str, load: float, ours: Sequence[Outcome], cake: Sequence[Outcome]
) -> tuple[Cell, ...]:
    mine, theirs = (Quantiles.of([t for o in side for t in o.ttft]) for side in (ours, cake))
    mean, p99 = mine.mean / theirs.mean, mine.p99 / theirs.p99
    pairs = [a.mean / b.mean for a, b in zip(ours, cake, strict=True)]
    least = 0.90 if load >= 0.5 else 1.0
    limits = f"mean {least:.2f}, P99 1.02"
    kept = verdict(mean <= least, p99 <= 1.02)
    p90, longest = mine.p90 / theirs.p90, mine.longest / theirs.longest
    return (name, load, mean, p90, p99, longest, max(pairs), limits, kept)


# -- closed batches --------------------------------------------------------------------------------

CLOSED: Final = {
    "0.5k to 8k": EIGHT,
    "log-normal 15k": Lengths("lognormal", (15000.0, 1.0)),
    "uniform 1k-32k": Lengths("uniform", (1024.0, 32768.0)),
}
BATCHES: Final = 4


def batch(lengths: Lengths, seed: int, count: int = 8) -> tuple[Job, ...]:
    """``count`` requests that are all there at 0."""
    return tuple(synthetic(count, lengths, chunk_tokens=256, suffix_tokens=256, seed=seed))


def closed(run_all: Runner) -> list[Table]:
    """Batches of eight against the bounds of their mean and of their makespan."""
    rows: list[tuple[Cell, ...]] = []
    variants = [("adaptive", "mean"), ("adaptive", "makespan"), ("adaptive", "tail")]
    variants += [(name, "tail") for name in ("cake", "cake-sjf", "two-pointer", "staircase")]
    for name, lengths in CLOSED.items():
        seeds = range(BATCHES if lengths is not EIGHT else 1)
        for policy, objective in variants:
            scenario = setting(LLAMA, "25gbps", objective=objective)
            cases = [Case(scenario, batch(lengths, seed), policy) for seed in seeds]
            rows.append((name, policy, objective, *_closed_row(cases, run_all(cases))))
    heads = ("lengths", "policy", "objective", "mean / bound", "makespan / bound", "compute",
             "link", "verdict")  # fmt: skip
    note = (
        "8B on an H100, 25 Gbps, suffix 256, cells of one layer. Means over "
        f"{BATCHES} batches; compute, link: useful share of the seconds in which a prefix waited. "
        "Asked of objective mean: mean within 1.04, both shares at least 0.98. Policies that are "
        "not adaptive bring their own order."
    )
    return [Table("Closed batches of eight", heads, tuple(rows), note)]


def _closed_row(cases: Sequence[Case], found: Sequence[Outcome]) -> tuple[Cell, ...]:
    means, spans = [], []
    for case, outcome in zip(cases, found, strict=True):
        place = case.scenario.placement(named=False).place
        fluid = [case.scenario.fluid(place(job, 0)) for job in case.jobs]
        means.append(outcome.mean / mean_lower_bound(fluid))
        spans.append(outcome.summary.makespan / batch_fluid_seconds(fluid))
    compute, link = utilisation(found)
    judged = cases[0].scenario.objective == "mean"
    kept = verdict(fmean(means) <= 1.04, min(compute, link) >= 0.98) if judged else ""
    return (fmean(means), fmean(spans), compute, link, kept)


def utilisation(found: Sequence[Outcome]) -> tuple[float, float]:
    """Of compute and of the only link, mean of all runs."""
    pairs = [tuple(each.summary.utilisation.values()) for each in found]
    return fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)


# -- the papers ------------------------------------------------------------------------------------

RATES: Final = ("10gbps", "40gbps", "80gbps")


class ByLayer(TwoPointer):
    """Layer-wise at any length."""

    def by_layers(self, spec: RequestSpec) -> bool:
        return True


class ByToken(TwoPointer):
    """Token-wise at any length."""

    def by_layers(self, spec: RequestSpec) -> bool:
        return False


def papers(run_all: Runner) -> list[Table]:
    """What the papers show, on our model of their machines."""
    return [_against(run_all), _crossover(run_all), _utilisations(run_all)]


def _against(run_all: Runner) -> Table:
    names = ("recompute", "load", "cake", "two-pointer", "staircase", "adaptive")
    rows: list[tuple[Cell, ...]] = []
    for preset in (LLAMA, QWEN):
        for rate in RATES:
            for length in (4096, 16384, 65536):
                scenario = setting(preset, rate)
                found = run_all([Case(scenario, single(length), name) for name in names])
                times = [each.mean for each in found]
                best = min(times[:-1])
                where = (preset.partition(":")[2], rate, tokens(length))
                kept = verdict(times[-1] <= 1.005 * best)
                rows.append((*where, *times, times[-1] / best, kept))
    heads = ("model", "link", "prefix", *names, "/ best other", "verdict")
    note = "TTFT in seconds, one request on an idle H100, suffix 256. Kept: nobody is 0.5 % faster."
    return Table("TTFT of single requests, 8B models", heads, tuple(rows), note)


def _crossover(run_all: Runner) -> Table:
    """Layer-wise passes are as wide as the prompt, token-wise ones a chunk of 512; then both on
    the grid that serves."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    rows: list[tuple[Cell, ...]] = []
    for rate in RATES:
        for name in ("own widths", "one grid"):
            cases = []
            for length in lengths:
                wide, narrow = (FINE, FINE) if name == "one grid" else (
                    TileGrid((), length), TileGrid((), 512)
                )  # fmt: skip
                cases += [
                    Case(setting(LLAMA, rate, grid=wide), single(length), ByLayer),
                    Case(setting(LLAMA, rate, grid=narrow), single(length), ByToken),
                ]
            times = [each.mean for each in run_all(cases)]
            ratios = [token / layer for layer, token in zip(times[::2], times[1::2], strict=True)]
            better = [n for n, r in zip(lengths, ratios, strict=True) if r < 1]
            rows.append((rate, name, *ratios, tokens(better[0]) if better else "none"))
    heads = ("link", "grid", *map(tokens, lengths), "token-wise first wins at")
    note = (
        "Token-wise TTFT / layer-wise TTFT of the two pointers, Llama-3.1-8B on an H100. Own "
        "widths: layer-wise passes as wide as the prompt, token-wise passes of 512. The paper "
        f"profiles the length; `two-pointer` here has {TwoPointer.threshold_tokens} tokens."
    )
    return Table("Layer-wise against token-wise", heads, tuple(rows), note)


def _utilisations(run_all: Runner) -> Table:
    published = {"two-pointer": (0.88, 0.78), "staircase": (0.89, 0.89), "adaptive": (0.88, 0.89)}
    rows: list[tuple[Cell, ...]] = []
    for rate in ("25gbps", "40gbps"):
        best = (0.0, 0.0)
        for name, (compute, link) in published.items():
            lengths = CLOSED["log-normal 15k"]
            scenario = setting(LLAMA, rate)
            cases = [Case(scenario, batch(lengths, seed), name) for seed in range(BATCHES)]
            ours = utilisation(run_all(cases))
            if name == "adaptive":
                least = ours[0] >= max(compute, best[0]), ours[1] >= max(link, best[1])
                kept = verdict(*least)
            else:
                near = all(abs(a - b) <= 0.05 for a, b in zip(ours, (compute, link), strict=True))
                kept = "within 5 points" if near else f"**{_by(ours, (compute, link))}**"
                best = max(best[0], ours[0]), max(best[1], ours[1])
            shown = f"{compute:.0%} / {link:.0%}".replace("%", " %")
            asked = f"at least {shown}" if name == "adaptive" else shown
            rows.append((rate, name, asked, percent(ours[0]), percent(ours[1]), kept))
    heads = ("link", "policy", "published compute / I/O", "compute", "I/O", "verdict")
    note = (
        "Batches of eight, log-normal around 15k, useful seconds only. Published: v1 (two-pointer) "
        "and v2 (staircase) on their machines; their batches are not known to us. adaptive is kept "
        "where it reaches the least and is not below our version of either."
    )
    return Table("Utilisation while restoring a batch", heads, tuple(rows), note)


def _by(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return ", ".join(f"{100 * (a - b):+.0f}" for a, b in zip(ours, theirs, strict=True)) + " points"


# -- the claims ------------------------------------------------------------------------------------

BASELINES: Final = {
    "recompute": "vLLM, SGLang",
    "load": "LMCache, SGLang HiCache",
    "cake": "Cake",
}
CLAIM_LENGTHS: Final = (2048, 4096, 8192, 16384, 32768, 65536)


def claims(run_all: Runner) -> list[Table]:
    """10-62 % less TTFT, more so at the tail, and more against recompute the longer the prefix."""
    points = [(p, rate, n) for p in (LLAMA, QWEN) for rate in RATES for n in CLAIM_LENGTHS]
    names = ("adaptive", *BASELINES)
    cases = [
        Case(setting(preset, rate, layers=4), single(length), name)
        for preset, rate, length in points
        for name in names
    ]
    flat = [each.mean for each in run_all(cases)]
    times = [flat[i : i + len(names)] for i in range(0, len(flat), len(names))]
    return [_reductions(times), _tails(run_all), _growth(points, times)]


def _reductions(times: Sequence[Sequence[float]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for place, (name, systems) in enumerate(BASELINES.items(), 1):
        less = sorted(1 - each[0] / each[place] for each in times)
        share = sum(x >= 0.10 for x in less) / len(less)
        shown = [percent(x) for x in (less[0], median(less), less[-1], share)]
        rows.append((f"{name} ({systems})", "10-62 %", *shown, verdict(less[0] >= 0.10)))
    heads = ("below", "claimed", "least", "median", "most", "points of 10 % or more", "verdict")
    note = (
        f"TTFT of adaptive below the baseline's over {len(times)} points: Llama-3.1-8B and "
        "Qwen3-8B on an H100, 10/40/80 Gbps, 2k to 64k, one request. Kept: no point below 10 %."
    )
    return Table("The claim of 10-62 % less TTFT", heads, tuple(rows), note)


def _tails(run_all: Runner) -> Table:
    rows: list[tuple[Cell, ...]] = []
    seeds = range(6)
    for load in (0.3, 0.5):
        pools = []
        for name in ("adaptive", *BASELINES):
            found = run_all([MAIN.case(name, load, "tail", seed) for seed in seeds])
            pools.append(Quantiles.of([t for each in found for t in each.ttft]))
        ours = pools[0]
        for (name, systems), theirs in zip(BASELINES.items(), pools[1:], strict=True):
            less = [
                1 - a / b
                for a, b in (
                    (ours.mean, theirs.mean),
                    (ours.p50, theirs.p50),
                    (ours.p90, theirs.p90),
                    (ours.p99, theirs.p99),
                )
            ]
            kept = verdict(min(less[2:]) > less[0])
            rows.append((f"{name} ({systems})", load, *map(percent, less), kept))
    heads = ("below", "load", "mean", "P50", "P90", "P99", "verdict")
    note = f"{MAIN.name}, objective tail, {len(seeds)} seeds. Kept: P90 and P99 gain more than the mean."
    return Table("The claim of larger gains at P90-P99", heads, tuple(rows), note)


def _growth(
    points: Sequence[tuple[str, str, int]], times: Sequence[Sequence[float]]
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    step = len(CLAIM_LENGTHS)
    for i in range(0, len(points), step):
        gaps = [each[1] - each[0] for each in times[i : i + step]]
        ratios = [each[1] / each[0] for each in times[i : i + step]]
        seconds = verdict(all(a < b for a, b in pairwise(gaps)))
        factor = verdict(all(a < b for a, b in pairwise(ratios)))
        model = points[i][0].partition(":")[2]
        cells = [f"{ratio:.2f}x" for ratio in ratios]
        rows.append((model, points[i][1], *cells, f"{gaps[0]:.3f}, {gaps[-1]:.2f}", seconds, factor))
    heads = ("model", "link", *map(tokens, CLAIM_LENGTHS), "seconds, first and last",
             "in seconds", "as a factor")  # fmt: skip
    return Table("The claim that the gap to recompute grows with length", heads, tuple(rows),
                 "TTFT of recompute / TTFT of adaptive; kept: it grows at every step.")  # fmt: skip


# -- ablation --------------------------------------------------------------------------------------


class NoOverlap(Adaptive):
    """The suffix waits for the whole prefix."""

    overlaps: ClassVar[bool] = False


class NoHedge(Adaptive):
    """What is being loaded is never raced."""

    hedges: ClassVar[bool] = False


class InOrder(Adaptive):
    """First come, first served."""

    order: ClassVar[Order | None] = FirstCome()


class AlwaysBegin(Adaptive):
    """Recompute starts even where it can save nothing."""

    def begin(self, gain: float | None) -> bool:
        return True


class WholeTiles(Adaptive):
    """The meeting tile is not split by layer."""

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return True


class Fixed(Adaptive):
    """The staircase of the moment of arrival, kept to the end."""

    plans: ClassVar[bool] = True

    def plan(self, what: Planned) -> Sequence[int] | None:
        return best_staircase(what)


ABLATIONS: Final[dict[str, type[Policy]]] = {
    "full": Adaptive,
    "without suffix overlap": NoOverlap,
    "without hedging": NoHedge,
    "first come, first served": InOrder,
    "without a threshold to begin": AlwaysBegin,
    "whole tiles, no split by layer": WholeTiles,
    "planned once, not corrected": Fixed,
}


def ablation(run_all: Runner) -> list[Table]:
    """What each power is worth, and how close several sources come to their bound."""
    return [_powers(run_all), _sources(run_all)]


def _powers(run_all: Runner) -> Table:
    fine = setting(LLAMA, "25gbps")
    places: dict[str, list[tuple[Scenario, tuple[Job, ...], str]]] = {
        name: [
            (case.scenario, case.jobs, trouble)
            for case in (MAIN.case("adaptive", 0.65, "tail", seed) for seed in range(3))
        ]
        for name, trouble in (("open 0.65", ""), ("link halves", "slow"), ("loads hang", "hang"))
    }
    places["4k + 1,024, 1:1"] = [(balanced(fine, 4096), single(4096, 1024), "")]
    places["16k, 1:1"] = [(balanced(fine, 16384), single(16384), "")]
    places["16k, 20:1"] = [(balanced(fine, 16384, 20.0), single(16384), "")]
    cases = [
        Case(scenario, jobs, policy, trouble)
        for policy in ABLATIONS.values()
        for runs in places.values()
        for scenario, jobs, trouble in runs
    ]
    found = iter(run_all(cases))
    means = [
        [fmean(next(found).mean for _ in runs) for runs in places.values()] for _ in ABLATIONS
    ]
    rows: list[tuple[Cell, ...]] = []
    for name, row in zip(ABLATIONS, means, strict=True):
        ratios = [mine / full for mine, full in zip(row, means[0], strict=True)]
        worth = "" if name == "full" else "gain" if max(ratios) >= 1.005 else "**no gain shown**"
        rows.append((name, *ratios, worth))
    rows.append(("full, seconds", *means[0], ""))
    note = (
        f"Mean TTFT / that of the full policy, objective tail; above 1: the power is worth that. "
        f"Open: {MAIN.name}, load 0.65, 3 seeds; link halves: half its speed every other 5 s; "
        "loads hang: one in 50 never answers, given up after 0.5 s."
    )
    return Table("Adaptive less one power", ("variant", *places, "verdict"), tuple(rows), note)


def _sources(run_all: Runner) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for first, share in (("dram", 0.5), ("50gbps", 0.5), ("dram", 1.0), ("50gbps", 1.0)):
        for length in (4096, 16384, 65536):
            both = setting(LLAMA, first, "25gbps")
            parts = tuple(replace(each, share=share) for each in both.channels)
            scenario = replace(both, channels=parts)
            measured = run_all([Case(scenario, single(length), "adaptive")])[0].mean
            if share == 1.0:
                place = scenario.placement(named=False).place
                bound = batch_fluid_seconds([scenario.fluid(place(single(length)[0], 0))])
            else:
                bound = halves_bound(scenario, length)
            name = f"{first} + 25gbps, {'a half each' if share < 1 else 'both have all'}"
            kept = verdict(measured <= 1.08 * bound)
            rows.append((name, tokens(length), measured, bound, measured / bound, 1.08, kept))
    heads = ("sources", "prefix", "adaptive, s", "two-channel bound, s", "ratio", "limit", "verdict")
    return Table("Several sources", heads, tuple(rows), "The second half of the prefix is on the "
                 "first source. The bound has the suffix in it.")  # fmt: skip


def halves_bound(scenario: Scenario, length: int, suffix: int = 256) -> float:
    """Least TTFT when the later half is on the first channel and the earlier on the second.

    In time ``t`` each channel delivers ``t`` seconds of its own half; what remains of either half
    costs at least its earliest cells, and all that has to fit into ``t`` less the suffix.
    """
    machine, middle = scenario.machine, length // 2
    pieces = scenario.grid.split(length, length + suffix)
    fixed = sum(machine.block_seconds(piece) for piece in pieces) * machine.layer_blocks
    halves = []
    for channel, start, stop in zip(
        scenario.channels, (middle, 0), (length, middle), strict=True
    ):
        cells = [
            (machine.block_seconds(tile), machine.block_bytes(tile.width) / channel.link.bandwidth)
            for tile in scenario.grid.split(start, stop)
            for _ in range(machine.layer_blocks)
        ]
        halves.append(cells)
    low, high = fixed, fixed + sum(cost for cells in halves for cost, _ in cells)
    for _ in range(60):
        t = (low + high) / 2
        fits = fixed + sum(_left_over(cells, t) for cells in halves) <= t
        low, high = (low, t) if fits else (t, high)
    return high


def _left_over(cells: Sequence[tuple[float, float]], t: float) -> float:
    """Seconds of compute for what a channel does not deliver of ``cells`` within ``t``."""
    left, spent = sum(load for _, load in cells) - t, 0.0
    for cost, load in cells:
        if left <= 0:
            break
        spent += cost * min(1.0, left / load)
        left -= load
    return spent


# -- the losing map --------------------------------------------------------------------------------

MAP_RATIOS: Final = (1 / 20, 1 / 8, 1 / 3, 1.0, 3.0, 8.0, 20.0)
MAP_LENGTHS: Final = tuple(256 << power for power in range(10))


def losing_map(run_all: Runner) -> list[Table]:
    """Who wins with one request, and by how much adaptive loses where it does."""
    scenario = setting(LLAMA, "25gbps", layers=4)
    names = ("recompute", "load", "cake", "two-pointer", "staircase", "adaptive")
    points = win_map(scenario, names, ratios=MAP_RATIOS, lengths=MAP_LENGTHS)
    rows: list[tuple[Cell, ...]] = []
    losses: list[tuple[Cell, ...]] = []
    for ratio in MAP_RATIOS:
        row: list[Cell] = [f"1:{1 / ratio:.0f}" if ratio < 1 else f"{ratio:.0f}:1"]
        for point in (each for each in points if each.ratio == ratio):
            others = {name: seconds for name, seconds in point.ttft.items() if name != "adaptive"}
            best = min(others, key=lambda name: others[name])
            share = point.ttft["adaptive"] / others[best]
            row.append(f"{share:.3f}" if share <= 1.0005 else f"**{share:.3f}** {best}")
            either = point.ttft["adaptive"] / min(others["recompute"], others["load"])
            if share > 1.0005:
                lost = 1e3 * (point.ttft["adaptive"] - others[best])
                losses.append((row[0], tokens(point.tokens), best, share - 1, lost, either))
        rows.append(tuple(row))
    losses = sorted(losses, key=lambda each: -float(each[3]))
    shown = tuple((*each[:3], percent(float(each[3])), *each[4:]) for each in losses[:20])
    either = [
        each.ttft["adaptive"] / min(each.ttft["recompute"], each.ttft["load"]) for each in points
    ]
    note = (
        "TTFT of adaptive / best other policy; bold with the winner's name where it loses. "
        f"Against the better single way: worst {max(either):.3f}, limit 1.05 plus a layer block "
        f"and a load; {verdict(max(either) <= 1.05)}. Cells of 4 layers, suffix 256."
    )
    heads = ("compute:I/O", *map(tokens, MAP_LENGTHS))
    lost_heads = ("compute:I/O", "prefix", "winner", "lost", "lost, ms", "/ better single way")
    return [
        Table("The map: adaptive by the best other policy", heads, tuple(rows), note),
        Table(f"Where adaptive loses ({len(losses)} of {len(points)} points)", lost_heads, shown),
    ]


# -- the command -----------------------------------------------------------------------------------

EXPERIMENTS: Final[dict[str, Callable[[Runner], list[Table]]]] = {
    "open": open_arrivals,
    "closed": closed,
    "papers": papers,
    "claims": claims,
    "ablation": ablation,
    "map": losing_map,
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="(default: %(default)s)")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    unknown = set(options.only) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(EXPERIMENTS)}")
    return options


def main() -> None:
    """Run what was chosen, print as it comes."""
    options = parse()
    found: dict[str, list[Table]] = {}
    with multiprocessing.Pool(options.processes) as pool:
        run_all: Runner = lambda cases: pool.map(run, cases, chunksize=1)  # noqa: E731
        for name in options.only:
            began = time.monotonic()
            found[name] = EXPERIMENTS[name](run_all)
            if not options.json:
                print(f"## {name}\n")
                for table in found[name]:
                    print(table.markdown(), flush=True)
                print(f"<!-- {time.monotonic() - began:.0f} s -->\n", flush=True)
    if options.json:
        tables = {name: [asdict(table) for table in each] for name, each in found.items()}
        print(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()

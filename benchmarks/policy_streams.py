"""Many requests at once: streams at several loads, and closed batches against their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final

from policy_runs import LLAMA, Case, Table, setting, verdict

from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.simulation import (
    Lengths,
    batch_fluid_seconds,
    mean_gap,
    mean_lower_bound,
    poisson,
    synthetic,
)
from cacheflow.simulation.jobs import WIDE
from cacheflow.simulation.results import Quantiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy_runs import Outcome, Row, Runner

    from cacheflow.scheduling import Policy
    from cacheflow.simulation import Job

EIGHT: Final = Lengths("fixed", (512, 1024, 2048, 3072, 4096, 5120, 6144, 8192))


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
    Open("8B on an A100, 10 Gbps, 8k, suffix 512", "a100:qwen3-8b", "10gbps", 8000, 512, 4, 70),
    Open("70B on four H100, 100 Gbps, 15k", "h100x4:llama-3.1-70b", "100gbps", 15000, 256, 10, 50),
)
MEAN_LIMITS: Final = {0.65: (0.75, 0.55), 0.85: (0.60, 0.40)}
LOADS: Final = (0.5, 0.65, 0.85)
SEEDS: Final = 20
MEAN_SEEDS: Final = 10


def open_arrivals(run_all: Runner) -> list[Table]:
    """Mean and tail of a stream at several loads, paired by seed."""
    cake = {
        (stream, load): _runs(run_all, stream, "cake", load)
        for stream in OPENS
        for load in ((0.3, *LOADS) if stream is MAIN else LOADS)
    }
    return [_open_mean(run_all, cake), _open_tail(run_all, cake)]


def _runs(
    run_all: Runner, stream: Open, policy: str, load: float, objective: str = "tail",
    seeds: int = SEEDS,
) -> list[Outcome]:  # fmt: skip
    return run_all([stream.case(policy, load, objective, seed) for seed in range(seeds)])


def _open_mean(run_all: Runner, cake: Mapping[tuple[Open, float], list[Outcome]]) -> Table:
    rows: list[Row] = []
    for stream in OPENS:
        for load, limits in MEAN_LIMITS.items():
            ours, v1 = (
                fmean(each.mean for each in _runs(run_all, stream, name, load, "mean", MEAN_SEEDS))
                for name in ("adaptive", "two-pointer")
            )
            # First come, first served whatever the objective: the runs of the other table.
            first = fmean(each.mean for each in cake[stream, load][:MEAN_SEEDS])
            kept = verdict(ours <= limits[0] * first, ours <= limits[1] * v1)
            asked = f"{limits[0]:.2f}, {limits[1]:.2f}"
            rows.append((stream.name, load, ours, first, v1, ours / first, ours / v1, asked, kept))
    heads = ("setting", "load", "adaptive, s", "cake, s", "two-pointer, s", "/ cake",
             "/ two-pointer", "limits", "verdict")  # fmt: skip
    note = (
        f"Mean TTFT over {MEAN_SEEDS} seeds. Load: share of what compute and link carry together."
    )
    return Table("Open arrivals, objective mean", heads, tuple(rows), note)


def _open_tail(run_all: Runner, cake: Mapping[tuple[Open, float], list[Outcome]]) -> Table:
    rows = [
        _tail_row(stream.name, load, _runs(run_all, stream, "adaptive", load), theirs)
        for (stream, load), theirs in cake.items()
    ]
    heads = ("setting", "load", "mean / cake", "P90 / cake", "P99 / cake", "longest / cake",
             "highest mean of a seed", "limits", "verdict")  # fmt: skip
    note = (
        f"{SEEDS} paired seeds; quantiles of all their requests together; highest mean of a seed: "
        "the pair in which adaptive's mean is highest by cake's."
    )
    return Table("Open arrivals, objective tail", heads, tuple(rows), note)


def _tail_row(name: str, load: float, ours: Sequence[Outcome], cake: Sequence[Outcome]) -> Row:
    mine, theirs = (Quantiles.of([t for o in side for t in o.ttft]) for side in (ours, cake))
    mean, p99 = mine.mean / theirs.mean, mine.p99 / theirs.p99
    pairs = [a.mean / b.mean for a, b in zip(ours, cake, strict=True)]
    least = 0.90 if load >= 0.5 else 1.0
    limits = f"mean {least:.2f}, P99 1.02"
    kept = verdict(mean <= least, p99 <= 1.02)
    p90, longest = mine.p90 / theirs.p90, mine.longest / theirs.longest
    return (name, load, mean, p90, p99, longest, max(pairs), limits, kept)


# -- closed batches --------------------------------------------------------------------------------


class NoHedge(Adaptive):
    """What is being loaded is never raced."""

    hedges: ClassVar[bool] = False


CLOSED: Final = {
    "0.5k to 8k": EIGHT,
    "log-normal 15k": Lengths("lognormal", (15000.0, 1.0)),
    "uniform 1k-32k": Lengths("uniform", (1024.0, 32768.0)),
}
BATCHES: Final = 4


def batch(lengths: Lengths, seed: int, chunk_tokens: int = 256) -> tuple[Job, ...]:
    """Eight requests that are all there at 0."""
    return tuple(synthetic(8, lengths, chunk_tokens=chunk_tokens, suffix_tokens=256, seed=seed))


VARIANTS: Final[tuple[tuple[str, str | type[Policy], str], ...]] = (
    ("adaptive", "adaptive", "mean"),
    ("adaptive, no hedging", NoHedge, "mean"),
    ("adaptive", "adaptive", "makespan"),
    ("adaptive", "adaptive", "tail"),
    *((name, name, "tail") for name in ("cake", "cake-sjf", "two-pointer", "staircase")),
)


def closed(run_all: Runner) -> list[Table]:
    """Batches of eight against the bounds of their mean and of their makespan."""
    fine = setting(LLAMA, "25gbps")
    wide = setting(LLAMA, "25gbps", layers=4, chunk_tokens=512, grid=WIDE)
    plan = [(name, fine, lengths, each) for name, lengths in CLOSED.items() for each in VARIANTS]
    lengths = CLOSED["log-normal 15k"]
    plan += [("log-normal 15k, wide cells", wide, lengths, each) for each in VARIANTS[:2]]
    rows: list[Row] = []
    for name, scenario, lengths, (called, policy, objective) in plan:
        seeds = range(1 if lengths is EIGHT else BATCHES)
        meant = replace(scenario, objective=objective)
        cases = [Case(meant, batch(lengths, seed, meant.chunk_tokens), policy) for seed in seeds]
        rows.append((name, called, objective, *_closed_row(cases, run_all(cases))))
    heads = ("lengths", "policy", "objective", "mean / bound", "makespan / bound", "compute",
             "link", "verdict")  # fmt: skip
    note = (
        "8B on an H100, 25 Gbps, suffix 256, cells of one layer (wide: 2,048 tokens x 4). Means of "
        f"{BATCHES} batches; compute, link: useful share of the seconds in which a prefix waited. "
        "Asked of objective mean: mean within 1.04, both shares at least 0.98. Policies that are "
        "not adaptive bring their own order."
    )
    return [Table("Closed batches of eight", heads, tuple(rows), note)]


def _closed_row(cases: Sequence[Case], found: Sequence[Outcome]) -> Row:
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

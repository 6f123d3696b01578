"""Is ``adaptive`` ever worse than a simpler way? Thousands of random restores in virtual time.

Single requests: restore time against the better of recompute alone and load alone (at full depth),
both computed, not simulated, beyond one layer block of compute and one load unit, which is what a
decision cannot take back. Compute:I/O 1:20 to 20:1, 256 to 128k tokens, 4 to 32 layer blocks.
Batches of 1 to 32: mean time to first token under the objective ``mean`` and last completion under
``makespan``, against the best of ``cake``, ``two-pointer`` and ``staircase`` on the same instance.
Every third instance is warm (true costs were observed), every third cold, and every third has seen
costs that are wrong by up to ten times either way. Ends with 1 when a limit is not kept.

    make bench-never_worse ARGS="--instances 2000 --seed 0 --json"
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from inspect import signature
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import track

from cacheflow.scheduling import POLICIES, BatchScheduler
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.types import RequestSpec, Tile

CHUNK: Final = 256
CHUNK_BYTES: Final = 32 << 20
GRID: Final = TileGrid()
PROFILES: Final = ("warm", "cold", "wrong")
RIVALS: Final = ("cake", "two-pointer", "staircase")
OBJECTIVES: Final = ("mean", "makespan")
SINGLE_LIMITS: Final = {0.99: 1.02, 1.0: 1.05}
BATCH_LIMITS: Final = {
    "warm": {0.95: 1.02, 1.0: 1.10},
    "cold": {0.99: 1.10},
    "wrong": {0.99: 1.10},
}
EXACT: Final = 1e-6
"""Floating point, relative."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One random restore: true costs, what was believed before, and who asks for what when."""

    seed: int
    prefixes: tuple[int, ...]
    suffixes: tuple[int, ...]
    arrivals: tuple[float, ...]
    layers: int
    token: float
    """Seconds of linear work per token and layer block."""
    crossover: float
    """Position (tokens) at which attention costs as much as linear work."""
    overhead: float
    """Seconds per tile and layer block that its width does not change."""
    attention_off: float
    """The model's idea of attention work relative to linear work, over the truth."""
    ratio: float
    """Recompute-alone time over load-alone time of all requests together."""
    bandwidth: float
    latency: float
    profile: str
    compute_off: float
    link_off: float

    @property
    def stride(self) -> int:
        return CHUNK_BYTES // self.layers

    def layer_seconds(self, tile: Tile) -> float:
        """Seconds of one layer block of ``tile``."""
        middle = tile.start + tile.width / 2
        return self.overhead + self.token * tile.width * (1 + middle / self.crossover)

    def specs(self) -> list[RequestSpec]:
        """The requests, in order of arrival."""
        return [
            make_spec(
                prefix,
                prefix + suffix,
                layers=self.layers,
                request_id=f"r{i}",
                arrival=arrival,
            )
            for i, (prefix, suffix, arrival) in enumerate(
                zip(self.prefixes, self.suffixes, self.arrivals, strict=True)
            )
        ]

    def recompute_seconds(self, spec: RequestSpec) -> float:
        """Recompute alone, on the grid."""
        return self.layers * sum(map(self.layer_seconds, spec.tiles))

    def load_seconds(self, spec: RequestSpec) -> float:
        """Load alone, the link never idle."""
        return spec.prefix_tokens // CHUNK * CHUNK_BYTES / self.bandwidth + self.latency

    def granularity(self, spec: RequestSpec) -> float:
        """One layer block of compute and one load unit (a layer block of the widest tile).

        A channel of which nothing is known is first asked for one layer: one more latency.
        """
        widest = max(tile.width for tile in spec.tiles) // CHUNK * self.stride
        block = max(map(self.layer_seconds, spec.tiles))
        latencies = 2 if self.profile == "cold" else 1
        return block + widest / self.bandwidth + latencies * self.latency


def log_uniform(chance: random.Random, low: float, high: float) -> float:
    """Every power of ten as likely as the next."""
    return float(low * (high / low) ** chance.random())


def draw(seed: int, requests: int, longest: int = 128 << 10) -> Instance:
    """A random instance; the same for the same arguments."""
    chance = random.Random(f"{seed} {requests}")
    layers = chance.randint(4, 32)
    token = log_uniform(chance, 5e-6, 1e-3) / layers
    profile = PROFILES[seed % len(PROFILES)]
    wrong = profile == "wrong"
    single = requests == 1
    known = Instance(
        seed=seed,
        prefixes=tuple(
            int(log_uniform(chance, CHUNK, longest)) // CHUNK * CHUNK for _ in range(requests)
        ),
        suffixes=tuple(1 if single else int(log_uniform(chance, 1, 1024)) for _ in range(requests)),
        arrivals=(0.0,) * requests,
        layers=layers,
        token=token,
        crossover=log_uniform(chance, 4 << 10, 64 << 10),
        overhead=chance.choice([0.0, 256 * token * chance.random()]),
        attention_off=log_uniform(chance, 0.5, 2.0),
        ratio=log_uniform(chance, 1 / 20, 20),
        bandwidth=1.0,
        latency=log_uniform(chance, 2e-5, 5e-3),
        profile=profile,
        compute_off=log_uniform(chance, 0.1, 10) if wrong else 1.0,
        link_off=log_uniform(chance, 0.1, 10) if wrong else 1.0,
    )
    alone = sum(map(known.recompute_seconds, known.specs()))
    loads = alone / known.ratio
    span = 0.0 if single or chance.random() < 0.5 else 1 / (1 / alone + 1 / loads)
    return replace(
        known,
        bandwidth=sum(known.prefixes) // CHUNK * CHUNK_BYTES / loads,
        arrivals=tuple(sorted(chance.uniform(0, span) for _ in range(requests))),
    )


# -- one run -----------------------------------------------------------------------------------


def play(instance: Instance, policy: str, objective: str = "") -> VirtualRun:
    """Run ``instance`` to its end; arrivals are counted from the clock's :data:`start`."""
    run = VirtualRun(
        instance.layer_seconds,
        {"link": Link(instance.bandwidth, instance.latency)},
        linear=1.0,
        attention=instance.attention_off / instance.crossover,
        **({"objective": objective} if objective else {}),
    )
    specs = instance.specs()
    if instance.profile != "cold":
        believe(run, instance)
    start = run.clock.now()
    for spec in specs:
        layers = ((1 << spec.num_layers) - 1,) * (spec.prefix_tokens // CHUNK)
        moved = replace(spec, arrival=start + spec.arrival)
        run.arrive(moved, [Coverage("link", layers, instance.stride)], policy)
    run.run(*(spec.id for spec in specs))
    for spec in specs:
        run.restored_at[spec.id] -= start + spec.arrival
        run.finished_at[spec.id] -= start + spec.arrival
    return run


def believe(run: VirtualRun, instance: Instance) -> None:
    """Let the models observe the true costs times ``compute_off`` and ``link_off``."""
    longest = max(16 << 10, *instance.prefixes, 0)
    tiles = list(GRID.split(0, longest))
    random.Random(instance.seed).shuffle(tiles)
    for tile in (tiles * (1 + 64 // len(tiles)))[:200]:
        run.compute.observe(tile, instance.layer_seconds(tile) * instance.compute_off)
    channel, nbytes = run.scheduler.channel("link"), 8 * instance.stride
    seconds = nbytes / instance.bandwidth * instance.link_off
    channel.started(-1, nbytes, 0.0)
    for i in range(1, 25):
        channel.started(-i - 1, nbytes, (i - 1) * seconds)
        channel.ended(-i, i * seconds, delivered=True)
    channel.ended(-25, 25 * seconds, delivered=True)
    run.clock.advance(25 * seconds)


# -- what is measured --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """``ratio`` is what the limits are about; ``raw`` the same without any allowance."""

    instance: Instance
    ratio: float
    raw: float
    seconds: float
    against: str


def single(seed: int, longest: int = 128 << 10) -> Result:
    """Time to first token of one request over the better single way, each computing the suffix."""
    instance = draw(seed, 1, longest)
    (spec,) = instance.specs()
    restored = play(instance, "adaptive").finished_at[spec.id]
    recompute, load = instance.recompute_seconds(spec), instance.load_seconds(spec)
    suffix = sum(instance.layer_seconds(piece) for piece in spec.suffix) * spec.num_layers
    best = min(recompute, load) + suffix
    beyond = (restored - instance.granularity(spec)) / best
    which = "recompute" if recompute < load else "load"
    return Result(instance, beyond, restored / best, restored, which)


def batch(seed: int, objective: str, rivals: Sequence[str], longest: int = 32 << 10) -> Result:
    """``objective`` of a batch over the best of ``rivals``."""
    size = random.Random(f"size {seed}").choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
    instance = draw(seed, size, longest)

    def value(policy: str) -> float:
        run = play(instance, policy, objective)
        if objective == "mean":
            return fmean(run.finished_at.values())
        specs = instance.specs()
        return max(spec.arrival + run.finished_at[spec.id] for spec in specs)

    ours = value("adaptive")
    best, against = min((value(policy), policy) for policy in rivals)
    return Result(instance, ours / best, ours / best, ours, against)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]


def misses(results: Iterable[Result], limits: dict[float, float]) -> list[str]:
    """Which limits are not kept, in words."""
    ratios = [result.ratio for result in results]
    if not ratios:
        return []
    found = []
    for share, limit in limits.items():
        value = quantile(ratios, share)
        if value > limit * (1 + EXACT):
            where = "at worst" if share == 1.0 else f"at the {share:.0%} mark"
            found.append(f"{value:.3f} {where}, at most {limit} allowed")
    return found


def batch_misses(results: Sequence[Result]) -> list[str]:
    """The same for batches: each profile has limits of its own."""
    return [
        f"{profile}: {miss}"
        for profile, limits in BATCH_LIMITS.items()
        for miss in misses((r for r in results if r.instance.profile == profile), limits)
    ]


def present_rivals() -> list[str]:
    """Those rivals that this version has."""
    return [name for name in RIVALS if name in POLICIES]


def has_objectives() -> bool:
    """Whether a scheduler can be told what to pursue."""
    return "objective" in signature(BatchScheduler).parameters


# -- the report --------------------------------------------------------------------------------


def distribution(results: Sequence[Result]) -> dict[str, float]:
    """Quantiles of what the limits are about."""
    ratios = [result.ratio for result in results]
    shares = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    found = {name: quantile(ratios, share) for name, share in shares.items()}
    return {"count": len(ratios), "mean": fmean(ratios), **found}


def regimes(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results by what could matter."""

    def by_ratio(result: Result) -> str:
        ratio = result.instance.ratio
        return "I/O-bound" if ratio < 1 / 3 else "compute-bound" if ratio > 3 else "balanced"

    def by_length(result: Result) -> str:
        total = sum(result.instance.prefixes)
        return "to 2k" if total <= 2048 else "to 16k" if total <= 16384 else "over 16k"

    groups: dict[str, list[Result]] = {"all": list(results)}
    for key in (lambda r: r.instance.profile, by_ratio, by_length, lambda r: f"by {r.against}"):
        for result in results:
            groups.setdefault(key(result), []).append(result)
    return groups


def report(title: str, results: Sequence[Result], wrong: Sequence[str]) -> dict[str, Any]:
    """Everything about one experiment, as plain data."""
    worst = sorted(results, key=lambda result: -result.ratio)[:5]
    return {
        "title": title,
        "regimes": {name: distribution(group) for name, group in regimes(results).items()},
        "worst": [asdict(result) for result in worst],
        "misses": list(wrong),
    }


def show(found: dict[str, Any]) -> None:
    """Print one report."""
    print(f"\n{found['title']}")
    head = next(iter(found["regimes"].values()))
    print(" " * 16 + "".join(f"{name:>9}" for name in head))
    for name, row in found["regimes"].items():
        cells = (f"{v:9d}" if k == "count" else f"{v:9.3f}" for k, v in row.items())
        print(f"{name:>16}" + "".join(cells))
    print("worst instances:")
    for result in found["worst"]:
        instance = result["instance"]
        facts = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in instance.items()
            if key not in ("arrivals", "suffixes", "prefixes") or len(instance["prefixes"]) == 1
        )
        size = len(instance["prefixes"])
        print(
            f"  {result['ratio']:.3f} (raw {result['raw']:.3f}) x {result['against']}, "
            f"{size} requests, {result['seconds']:.4g} s: {facts}"
        )
    for miss in found["misses"]:
        print(f"  LIMIT NOT KEPT: {miss}")


def run(seeds: range, batches: range, longest: int) -> list[dict[str, Any]]:
    """All experiments on the given seeds."""
    progress = Console(stderr=True)
    results = [single(seed, longest) for seed in track(seeds, "single", console=progress)]
    found = []
    if results:
        title = "Single requests: restore time over min(recompute, load), allowance taken off"
        found.append(report(title, results, misses(results, SINGLE_LIMITS)))
    rivals = present_rivals()
    if not (rivals and has_objectives()):
        print("note: no rival policies or no objectives here; batches are skipped", file=sys.stderr)
        return found
    for name in set(RIVALS) - set(rivals):
        print(f"note: there is no policy {name!r} yet; left out", file=sys.stderr)
    for objective in OBJECTIVES if batches else ():
        results = [
            batch(seed, objective, rivals) for seed in track(batches, objective, console=progress)
        ]
        title = f"Batches: {objective} over the best of {', '.join(rivals)}"
        found.append(report(title, results, batch_misses(results)))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=2000, help="single requests")
    parser.add_argument("--batches", type=int, help="default: a tenth of the instances")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the rest follow")
    parser.add_argument("--longest", type=int, default=128 << 10, help="longest prefix, tokens")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    count = parsed.instances // 10 if parsed.batches is None else parsed.batches
    begun = time.perf_counter()
    reports = run(
        range(parsed.seed, parsed.seed + parsed.instances),
        range(parsed.seed, parsed.seed + count),
        parsed.longest,
    )
    if parsed.json:
        print(json.dumps({"reports": reports, "seconds": time.perf_counter() - begun}))
    else:
        for each in reports:
            show(each)
        print(f"\n{time.perf_counter() - begun:.0f} s")
    raise SystemExit(1 if any(each["misses"] for each in reports) else 0)

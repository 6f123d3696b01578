"""Small restores against the exact static optimum on the same grid.

Run as a script to see the whole distribution: ``python -m tests.unit.scheduling.test_oracle``.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.scheduling import POLICIES
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, Tile, TileGrid
from tests.unit.scheduling import oracle
from tests.unit.scheduling.harness import OBJECTIVES, options, warm
from tests.unit.scheduling.oracle import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import RequestSpec

CHUNK: Final = 256
STRIDE: Final = 1 << 18
MEASURED: Final = [name for name in ("adaptive", "staircase") if name in POLICIES]
COARSEST: Final = 0.15
"""Largest share of a request's work in one cell; three by three equal cells have a ninth each."""
GRIDS: Final = (TileGrid((512, 512, 1024), 2048), TileGrid((), 512), TileGrid((), 1024))


@dataclass(frozen=True, slots=True)
class Small:
    """A small instance with costs that the compute model's shape can express exactly."""

    seed: int
    grid: TileGrid
    prefixes: tuple[int, ...]
    suffix: int
    layers: int
    token: float
    """Seconds of linear work per token and layer."""
    attention: float
    """Attention work per token and key, as a share of the linear work per token."""
    bandwidth: float
    launch: int = 0
    """What a pass costs whatever its width, in tokens of linear work: narrow tiles are dear."""

    def cost(self, tile: Tile) -> float:
        work = tile.width * (1 + self.attention * (tile.start + tile.width / 2))
        return self.token * (self.launch + work)

    def specs(self) -> list[RequestSpec]:
        return [
            make_spec(
                prefix,
                prefix + self.suffix,
                layers=self.layers,
                chunk=CHUNK,
                grid=self.grid,
                request_id=f"r{i}",
            )
            for i, prefix in enumerate(self.prefixes)
        ]

    def job(self, spec: RequestSpec, *, suffix: bool) -> Job:
        def grid(cost: dict[int, float]) -> oracle.Grid:
            return tuple((cost[tile.index],) * self.layers for tile in spec.tiles)

        return Job(
            grid({tile.index: self.cost(tile) for tile in spec.tiles}),
            grid({t.index: t.width // CHUNK * STRIDE / self.bandwidth for t in spec.tiles}),
            (sum(map(self.cost, spec.suffix)),) * self.layers if suffix else (),
        )


def draw(seed: int, requests: int = 1, suffix: int = 1, launch: int = 0) -> Small:
    """A random instance; compute:I/O between 1:4 and 4:1, no cell over :data:`COARSEST`."""
    chance = random.Random(f"{seed} {requests}")
    while True:
        small = _draw(chance, seed, requests, suffix, launch)
        jobs = [small.job(spec, suffix=False) for spec in small.specs()]
        if all(_coarseness(job) <= COARSEST for job in jobs):
            return small


def _coarseness(job: Job) -> float:
    """The largest cell (by its better way) as a share of all such cells."""
    cells = [
        min(pair)
        for rows in zip(job.compute, job.load, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    return max(cells) / sum(cells)


def _draw(chance: random.Random, seed: int, requests: int, suffix: int, launch: int) -> Small:
    grid, most = chance.choice(GRIDS), 4 if requests == 1 else 3
    layers = chance.randint(2, most)
    prefixes = tuple(grid.start(chance.randint(2, most)) for _ in range(requests))
    token, attention = 10 ** chance.uniform(-4.5, -3), chance.choice([0, 1e-4, 1e-3])
    small = Small(seed, grid, prefixes, suffix, layers, token, attention, 1.0, launch)
    alone = sum(layers * small.cost(tile) for spec in small.specs() for tile in spec.tiles)
    total = sum(prefixes) // CHUNK * STRIDE * layers
    return replace(small, bandwidth=total / alone * 4 ** chance.uniform(-1, 1))


def warm_run(small: Small, objective: str) -> VirtualRun:
    """A run whose models have seen the true costs."""
    run = VirtualRun(
        small.cost,
        {"link": Link(small.bandwidth)},
        linear=1.0,
        attention=small.attention,
        **options(objective),
    )
    tiles = [small.grid.tile(i) for i in range(5)]
    if small.launch:  # only passes of several widths tell it from the rest
        tiles += [Tile(0, start, start + small.suffix) for start in (0, tiles[1].start)]
    warm(run, tiles, small.cost, 64 * STRIDE)
    return run


def play(small: Small, policy: str, objective: str = OBJECTIVES[0]) -> list[tuple[float, float]]:
    """Seconds until each request was restored and finished."""
    run = warm_run(small, objective)
    start, specs = run.clock.now(), small.specs()
    for spec in specs:
        layers = ((1 << spec.num_layers) - 1,) * (spec.prefix_tokens // CHUNK)
        run.admit(spec, [Coverage("link", layers, STRIDE)], policy)
    run.run(*(spec.id for spec in specs))
    return [(run.restored_at[s.id] - start, run.finished_at[s.id] - start) for s in specs]


def restore_ratio(seed: int, policy: str) -> float:
    small = draw(seed)
    ((restored, _),) = play(small, policy)
    return restored / oracle.restore_optimum(small.job(small.specs()[0], suffix=False))


def ttft_ratio(seed: int, policy: str, launch: int = 0) -> float:
    small = draw(seed, suffix=(64, 256, 512)[seed % 3], launch=launch)
    ((_, finished),) = play(small, policy)
    return finished / oracle.ttft_optimum(small.job(small.specs()[0], suffix=True))


def size(seed: int) -> int:
    """Mostly pairs: the optimum of three takes long."""
    return 3 if seed % 10 == 9 else 2


def mean_ratio(seed: int, policy: str) -> float:
    small = draw(seed, size(seed))
    ends = [end for _, end in play(small, policy, "mean")]
    jobs = [small.job(spec, suffix=True) for spec in small.specs()]
    return sum(ends) / len(ends) / oracle.mean_optimum(jobs, gang=True)


def makespan_ratio(seed: int, policy: str) -> float:
    small = draw(seed, size(seed))
    ends = [end for _, end in play(small, policy, "makespan")]
    jobs = [small.job(spec, suffix=True) for spec in small.specs()]
    return max(ends) / oracle.makespan_optimum(jobs, gang=True)


RATIOS: Final = {
    "restore": restore_ratio,
    "ttft": ttft_ratio,
    "mean": mean_ratio,
    "makespan": makespan_ratio,
}


# -- the oracle itself -------------------------------------------------------------------------

cell_costs = st.floats(0.1, 10.0)


@st.composite
def jobs(draw: st.DrawFn, tiles: int = 3, layers: int = 3, suffix: bool = False) -> Job:
    height, width = draw(st.integers(1, tiles)), draw(st.integers(1, layers))

    def grid() -> oracle.Grid:
        return tuple(tuple(draw(cell_costs) for _ in range(width)) for _ in range(height))

    return Job(grid(), grid(), tuple(draw(cell_costs) for _ in range(width)) if suffix else ())


def test_all_staircases_are_tried() -> None:
    """Lattice paths: C(tiles + layers, layers) of them, none twice, none that rises."""
    found = list(oracle.staircases(4, 4))
    assert len(found) == len(set(found)) == 70
    assert all(list(heights) == sorted(heights, reverse=True) for heights in found)


def test_the_optimum_of_a_case_done_by_hand() -> None:
    """Two tiles, two layers, a second a cell either way: half and half."""
    ones = ((1.0, 1.0), (1.0, 1.0))
    assert oracle.restore_optimum(Job(ones, ones)) == 2.0
    assert oracle.ttft_optimum(Job(ones, ones, (1.0, 1.0))) == 4.0
    assert oracle.ttft_optimum(Job(ones, ((9.0, 0.1), (9.0, 0.1)), (1.0, 1.0))) == 4.0
    assert oracle.mean_optimum([Job(ones, ones)] * 2) == 3.0


@given(job=jobs(suffix=True))
def test_no_single_way_beats_the_optimum(job: Job) -> None:
    """The optimum is at most recompute alone, load alone, and at least half of the smaller."""
    alone = sum(map(sum, job.compute))
    loads = sum(map(sum, job.load))
    best = oracle.restore_optimum(job)
    assert best <= min(alone, loads) + 1e-9
    assert best <= oracle.ttft_optimum(job) <= best + sum(job.suffix) + 1e-9


@given(batch=st.lists(jobs(2, 2), min_size=2, max_size=3))
def test_both_resources_may_keep_the_same_order(batch: list[Job]) -> None:
    """Without a suffix a request is an order for two machines: permutation schedules suffice."""
    for optimum in (oracle.mean_optimum, oracle.makespan_optimum):
        assert optimum(batch, gang=True) == pytest.approx(optimum(batch))


# -- the policies ------------------------------------------------------------------------------


LIMITS: Final = {
    (what, "adaptive"): (1.02, 1.05) for what in ("restore", "ttft", "mean", "makespan")
} | {(what, "staircase"): (1.02, 1.05) for what in ("restore", "makespan")}
"""Mean and worst over the optimum. (``staircase`` serves the first first and waits with the suffix,
so it has no claim to the mean or to the first token.)"""


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
@pytest.mark.parametrize(("what", "policy"), LIMITS)
def test_close_to_the_static_optimum(what: str, policy: str) -> None:
    """Warm models, steady costs: within 2 % of the optimum on average, 5 % at worst."""
    ratios = [RATIOS[what](seed, policy) for seed in range(60)]
    average, worst = LIMITS[what, policy]
    assert sum(ratios) / len(ratios) <= average
    assert max(ratios) <= worst


@pytest.mark.no_cover
def test_close_to_the_optimum_where_narrow_tiles_are_dear() -> None:
    """A pass costs as much as 768 tokens whatever its width. One instance in 60 is a cell off."""
    ratios = sorted(ttft_ratio(seed, "adaptive", launch=768) for seed in range(60))
    assert sum(ratios) / len(ratios) <= 1.005
    assert ratios[-2] <= 1.05


# -- as a script -------------------------------------------------------------------------------


def show(what: str, policy: str, seeds: Sequence[int]) -> None:
    """Print one distribution and its five worst instances."""
    found = sorted((RATIOS[what](seed, policy), seed) for seed in seeds)
    values = [ratio for ratio, _ in found]
    cuts = [values[int(q * (len(values) - 1))] for q in (0.0, 0.5, 0.9, 0.99, 1.0)]
    mean = sum(values) / len(values)
    shown = " ".join(f"{cut:.4f}" for cut in cuts)
    lines = [f"{what:9} {policy:10} mean {mean:.4f}  0/50/90/99/100 %: {shown}"]
    lines += [f"    {ratio:.4f}  seed {seed}" for ratio, seed in found[-5:]]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--what", choices=list(RATIOS), action="append")
    parser.add_argument("--policy", choices=MEASURED, action="append")
    parsed = parser.parse_args()
    for each in parsed.what or RATIOS:
        for name in parsed.policy or MEASURED:
            show(each, name, range(parsed.instances))

"""Nobody waits for ever: bounds on how far later requests can put an earlier one off.

All in virtual time with steady costs that the models know. A *stream* of other requests is played
with and without those that must not matter, and the watched request may end no later with them
than without, but for what a decision cannot take back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from cacheflow.costs import fluid_seconds
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.harness import OBJECTIVES, options, warm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import RequestSpec, Tile

pytestmark = pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways

LAYERS: Final = 4
STRIDE: Final = 1 << 20
BANDWIDTH: Final = 8.0 * STRIDE / 0.05
GRID: Final = TileGrid()
SLACK: Final = 1.02
"""Cells of others under way when the watched request could use a resource again, relative."""


def cost(tile: Tile) -> float:
    """A tile of 2,048 tokens takes about as long as its loads: 50 ms a layer."""
    return 2e-5 * tile.width * (1 + 2e-5 * (tile.start + tile.width / 2))


def granularity(spec: RequestSpec) -> float:
    """Two layer blocks of compute and two load units of the widest tile."""
    widest = max(tile.width for tile in spec.tiles)
    return 2 * (max(map(cost, spec.tiles)) + widest // 256 * STRIDE / BANDWIDTH)


def pooled(spec: RequestSpec) -> float:
    """Seconds to restore and finish ``spec`` with both resources to itself."""
    cells = [tile for tile in spec.tiles for _ in range(LAYERS)]
    loads = [tile.width // 256 * STRIDE / BANDWIDTH for tile in cells]
    return fluid_seconds(list(map(cost, cells)), loads) + LAYERS * sum(map(cost, spec.suffix))


def request(name: str, arrival: float, prefix: int, deadline: float | None = None) -> RequestSpec:
    spec = make_spec(prefix, prefix + 64, layers=LAYERS, request_id=name, arrival=arrival)
    return replace(spec, deadline=deadline)


def stream(load: float, prefix: int, until: float, seed: int = 0) -> list[RequestSpec]:
    """Poisson arrivals that keep both resources busy for the share ``load`` of the time."""
    chance, now = random.Random(seed), 0.0
    found: list[RequestSpec] = []
    work = pooled(request("", 0.0, prefix))
    while now < until:
        now += chance.expovariate(load / work)
        found.append(request(f"s{len(found)}", now, prefix))
    return found


def ends(specs: Sequence[RequestSpec], objective: str) -> dict[str, float]:
    """When each request is finished, the first arrivals at 0."""
    run = VirtualRun(
        cost, {"link": Link(BANDWIDTH)}, linear=1.0, attention=2e-5, **options(objective)
    )
    warm(run, [GRID.tile(i) for i in range(8)], cost, 8 * STRIDE)
    start = run.clock.now()
    for spec in specs:
        layers = ((1 << LAYERS) - 1,) * (spec.prefix_tokens // 256)
        deadline = None if spec.deadline is None else start + spec.deadline
        moved = replace(spec, arrival=start + spec.arrival, deadline=deadline)
        run.arrive(moved, [Coverage("link", layers, STRIDE)])
    run.run(*(spec.id for spec in specs))
    return {name: end - start for name, end in run.finished_at.items()}


@pytest.mark.parametrize("load", [0.7, 0.95, 1.5])
def test_under_tail_nothing_overtakes_that_comes_later_than_what_is_left(load: float) -> None:
    """Ageing with beta 1: a request that arrived at ``a`` and needs ``R`` more ends as if nothing
    had arrived after ``a + R``, even when short ones come faster than can be served."""
    watched = request("watched", 0.0, 16384)
    others = stream(load, 1024, until=4 * pooled(watched))
    early = [spec for spec in others if spec.arrival <= pooled(watched) * 1.05]
    assert len(early) < len(others)
    late = ends([watched, *others], OBJECTIVES[0])["watched"]
    alone = ends([watched, *early], OBJECTIVES[0])["watched"]
    assert late <= alone * SLACK + granularity(watched)


@pytest.mark.parametrize("load", [0.95, 1.5])
def test_under_mean_longer_requests_never_put_off_a_shorter_one(load: float) -> None:
    """Shortest first: whoever has more left does not matter, however many there are."""
    watched = request("watched", 1.0, 2048)
    others = stream(load, 8192, until=4.0)
    (first, *rest) = (spec for spec in others if spec.arrival > watched.arrival)
    late = ends([watched, first, *rest], "mean")["watched"]
    assert late <= (ends([watched], "mean")["watched"] - 1.0) * SLACK + 1.0 + granularity(first)


def test_under_deadline_later_deadlines_never_put_off_an_earlier_one() -> None:
    """Earliest deadline first, short or long."""
    watched = request("watched", 0.0, 16384, deadline=pooled(request("", 0.0, 16384)) * 1.2)
    assert watched.deadline is not None
    others = [
        replace(spec, deadline=watched.deadline + spec.arrival + 0.1)
        for spec in stream(1.5, 1024, until=watched.deadline)
    ]
    late = ends([watched, *others], "deadline")["watched"]
    assert late <= ends([watched], "deadline")["watched"] * SLACK + granularity(watched)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("load", [0.7, 1.5])
def test_no_one_waits_longer_than_all_the_work_there_is(objective: str, load: float) -> None:
    """Whatever the objective, no resource idles while somebody waits: everybody is served by the
    last arrival plus the time that all requests, one after the other, would need."""
    watched = request("watched", 0.0, 16384)
    others = stream(load, 1024, until=2 * pooled(watched))
    found = ends([watched, *others], objective)
    total = sum(pooled(spec) + 0.02 * granularity(spec) for spec in (watched, *others))
    assert max(found.values()) <= others[-1].arrival + total * SLACK + granularity(watched)

"""What many requests on one prefix cost, and must not do to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.scheduling.order import Shortest
from cacheflow.scheduling.policies import POLICIES
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import RequestSpec

GRID = TileGrid((), 32)
CHUNK, LAYERS, STRIDE = 16, 4, 1 << 12
FULL = (1 << LAYERS) - 1


def spec(name: str, tiles: int = 2) -> RequestSpec:
    prefix = 32 * tiles
    return make_spec(prefix, prefix + 8, layers=LAYERS, chunk=CHUNK, grid=GRID, request_id=name)


class Crowd:
    """``others`` requests whose first tile is that of request ``first``."""

    def __init__(self, others: int) -> None:
        self.clock = ManualClock()
        self.scheduler = BatchScheduler(ComputeModel(1.0, 0.0), self.clock)
        for name in ("first", *(f"r{i}" for i in range(others))):
            leader = None if name == "first" else "first"
            tiles = 0 if leader is None else 1
            policy = load_policy("adaptive")
            self.scheduler.admit(spec(name, 4), policy, tiles=tiles, leader=leader)
            self.scheduler.extend_coverage(name, Coverage("link", (FULL,) * 8, STRIDE))

    def ranked(self, event: Callable[[], None]) -> int:
        """How many requests are ranked, how often, because of ``event``."""
        with patch.object(Shortest, "key", autospec=True, side_effect=Shortest.key) as key:
            event()
        return key.call_count

    def land(self) -> None:
        """A load lands."""
        load = self.scheduler.next_load("link", self.clock.now())
        assert load is not None
        self.clock.advance(load.nbytes * 1e-6)
        granted = self.scheduler.commit(load)
        self.scheduler.loaded(load, granted, self.clock.now())


def test_ranking_a_crowd_anew_takes_work_in_proportion_to_it() -> None:
    """The first load to land says what everything costs, so everybody is ranked anew: four times as
    many requests with a common beginning are about four times the work."""
    some, many = (Crowd(n) for n in (20, 80))
    few = some.ranked(some.land)
    assert few > 20
    assert many.ranked(many.land) < 8 * few


def test_a_load_of_its_own_ranks_nobody_else() -> None:
    """What is shared is there: from then on every load is one request's, and changes nothing for
    those that begin like it."""
    crowd = Crowd(50)
    while crowd.scheduler.complete_tokens("first") < 32:
        crowd.land()
    assert crowd.ranked(crowd.land) < 20


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_handed_out_what_another_restores(policy: str) -> None:
    """One request waits for its loads, another one, for which nothing is under way, for the first:
    compute is not handed its tiles only to be refused them, again and again, by any policy."""
    run = VirtualRun(lambda tile: 1e-3, {"link": Link(1e5)})
    coverage = [Coverage("link", (FULL,) * 4, STRIDE)]
    run.arrive(spec("a"), coverage, policy)
    run.arrive(spec("b"), coverage, policy, [("a", 2)])
    run.run("a", "b")
    assert len(run.writes) == 2 * LAYERS


def test_what_failed_is_not_asked_for_again_after_an_heir_has_gone() -> None:
    """A tile's only copy is damaged for its first owner. A more urgent request takes the tile over
    and is cancelled: the first one does not go back to what it knows to be damaged."""
    clock = ManualClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 0.0), clock)
    coverage = Coverage("link", (FULL, FULL), STRIDE)
    scheduler.admit(spec("a", 1), load_policy("load"))
    scheduler.extend_coverage("a", coverage)
    load = scheduler.next_load("link", clock.now())
    assert load is not None
    scheduler.failed(load, clock.now(), chunks=load.chunks, late=True)
    assert scheduler.next_load("link", clock.now()) is None
    scheduler.admit(spec("b", 1), load_policy("load"), tiles=1, leader="a")
    scheduler.raise_priority("b", 1)
    scheduler.cancel("b")
    scheduler.remove("b")
    assert scheduler.next_load("link", clock.now()) is None

"""Whatever the estimates say, somebody takes the next cell."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Claim, ComputeDone, Coverage, Load, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable

GRID = TileGrid((32, 32, 64), 128)


@pytest.mark.parametrize("ratio", [0.9, 0.99, 1.01, 1.05, 1.09, 1.2, 2.0])
def test_the_last_cell_is_taken_by_one_of_the_two(ratio: float) -> None:
    """One cell is left, nothing is on its way, and loading it takes ``ratio`` times its recompute:
    compute leaves room for being late, so both could think that the other is faster."""
    clock = ManualClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 0.0), clock)
    scheduler.admit(make_spec(32, 40, layers=3, chunk=16, grid=GRID), load_policy("adaptive"))
    batch = scheduler.next_compute(0.0)
    assert batch is not None
    (work,) = batch.work
    assert scheduler.claim(work, 0) is Claim.WRITE
    scheduler.extend_coverage("r", Coverage("a", (7, 7), 50))
    load = scheduler.next_load("a", 0.0)
    assert isinstance(load, Load)
    clock.advance(ratio)
    scheduler.loaded(load, scheduler.commit(load), clock.now())
    scheduler.computed(ComputeDone(work, 1, ()))
    scheduler._outlook.compute = ComputeModel(1.0, 0.0)
    scheduler._outlook.compute.observe(work.tile, 1.0)
    load = scheduler.next_load("a", clock.now())
    assert (load is not None) == (ratio <= 1.0)
    if load is None:
        batch = scheduler.next_compute(clock.now())
        assert batch is not None
        assert batch.work[0].tile == work.tile
        assert not batch.work[0].is_suffix
        assert scheduler.claim(batch.work[0], 1) is Claim.WRITE


class Watched(dict[int, int]):
    """Loads in flight; :attr:`midway` runs between the two steps of looking at them."""

    def __init__(self, midway: Callable[[], object]) -> None:
        super().__init__()
        self.midway = midway

    def values(self) -> Any:
        steps = iter(super().values())
        self.midway()
        return steps


def test_a_load_that_ends_amid_a_claim_disturbs_nothing() -> None:
    """The compute thread reads the channels' models while the loop would change them: it waits."""
    clock = ManualClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 0.0), clock)
    scheduler.admit(make_spec(32, 40, layers=9, chunk=16, grid=GRID), load_policy("load"))
    scheduler.extend_coverage("r", Coverage("a", (511, 511), 64))
    first = scheduler.next_load("a", 0.0)
    assert isinstance(first, Load)
    clock.advance(1.0)
    scheduler.loaded(first, scheduler.commit(first), clock.now())
    amid, begun = threading.Event(), threading.Event()

    def midway() -> None:
        if threading.current_thread() is not threading.main_thread():
            amid.set()
            begun.wait(0.05)

    model = scheduler.channel("a")
    model._in_flight = Watched(midway)
    second = scheduler.next_load("a", clock.now())
    assert isinstance(second, Load)
    work = TileWork("r", make_spec(32, 40, grid=GRID, chunk=16).tiles[0], 0)
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(scheduler.claim, work, 0)
        assert amid.wait(10)
        scheduler.failed(second, clock.now(), chunks=())
        begun.set()
        assert claim.result(10) is Claim.REFUSED

"""Whatever the estimates say, somebody takes the next cell."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from cacheflow.clock import ManualClock
from cacheflow.costs import ChannelModel, ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Claim, ComputeDone, Coverage, Load, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable

GRID = TileGrid((32, 32, 64), 128)


@pytest.mark.parametrize("ratio", [0.9, 0.99, 1.01, 1.2, 1.26, 1.3, 1.36, 1.5, 2.0])
def test_the_last_cell_is_taken_by_one_of_the_two(ratio: float) -> None:
    """One cell is left, nothing is on its way, and loading it takes ``ratio`` times its recompute:
    compute leaves room for being late, so both could think that the other is faster. A load of
    layer 1 may be as late as the suffix needs for layer 0: a quarter of a second."""
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
    assert (load is not None) == (ratio <= 1.25)
    if load is None:
        batch = scheduler.next_compute(clock.now())
        assert batch is not None
        if batch.work[0].is_suffix:  # compute left the cell to the channel, which now takes it
            assert scheduler.next_load("a", clock.now()) is not None
        else:
            assert batch.work[0].tile == work.tile
            assert scheduler.claim(batch.work[0], 1) is Claim.WRITE


class Watched(ChannelModel):
    """A model that runs :attr:`midway` while it is being read."""

    def __init__(self, midway: Callable[[], object]) -> None:
        super().__init__()
        self.midway = midway

    def left(self, nbytes: float, now: float) -> float | None:
        self.midway()
        return super().left(nbytes, now)


def test_a_load_that_ends_amid_a_claim_disturbs_nothing() -> None:
    """The compute thread reads the channels' models while the loop would change them: it waits."""
    clock = ManualClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 0.0), clock)
    scheduler.admit(make_spec(32, 40, layers=9, chunk=16, grid=GRID), load_policy("adaptive"))
    amid, begun = threading.Event(), threading.Event()
    ended: list[bool] = []

    def midway() -> None:
        if threading.current_thread() is not threading.main_thread():
            amid.set()
            begun.wait(0.05)
            ended.append(model.in_flight == 0)

    scheduler.channel("a")
    model = scheduler._outlook.channels["a"] = Watched(midway)
    scheduler.extend_coverage("r", Coverage("a", (511, 511), 64))
    load = scheduler.next_load("a", clock.now())
    assert isinstance(load, Load)
    batch = scheduler.next_compute(clock.now())
    assert batch is not None
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(scheduler.claim, batch.work[0], 0)
        assert amid.wait(10)
        scheduler.failed(load, clock.now(), chunks=())
        begun.set()
        assert claim.result(10) is Claim.WRITE
    assert ended
    assert not any(ended)

"""One cell of a tile delivered in parts, by two channels or by two loads of one."""

from __future__ import annotations

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Claim, Coverage, Load, TileGrid

GRID = TileGrid((32, 32, 64), 128)


def test_compute_keeps_off_a_cell_while_a_part_is_being_copied() -> None:
    """One part of a cell has landed, the other is being copied into the KV cache: compute must not
    write the cell under that copy, however late the channel is."""
    clock = ManualClock()
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), clock)
    scheduler.admit(make_spec(32, 40, layers=1, chunk=16, grid=GRID), load_policy("adaptive"))
    scheduler.extend_coverage("r", Coverage("a", (1, 0), 64))
    scheduler.extend_coverage("r", Coverage("b", (0, 1), 64))
    loads = [scheduler.next_load(name, 0.0) for name in "ab"]
    first, second = loads
    assert isinstance(first, Load)
    assert isinstance(second, Load)
    assert scheduler.commit(first) == scheduler.commit(second) == 1
    scheduler.loaded(first, 1, 1.0)
    clock.advance(1e6)
    assert scheduler.next_compute(clock.now()) is None
    scheduler.loaded(second, 1, clock.now())
    assert scheduler.restored("r")
    batch = scheduler.next_compute(clock.now())
    assert batch is not None
    assert batch.work[0].is_suffix
    assert scheduler.claim(batch.work[0], 0) is Claim.WRITE

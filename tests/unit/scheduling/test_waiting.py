"""What is under way: not done twice while it is on time, and waited for where that is worth it."""

from __future__ import annotations

import pytest

from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.harness import warm

GRID = TileGrid((), 256)
STRIDE = 1 << 10


def run_of(cell: float, load: float, objective: str = "mean") -> VirtualRun:
    """A tile-layer takes ``cell`` seconds, its load ``load``; both are known."""
    run = VirtualRun(
        lambda tile: cell * tile.width / 256,
        {"link": Link(STRIDE / load)},
        linear=1.0,
        attention=0.0,
        objective=objective,
    )
    warm(run, [GRID.tile(i) for i in range(5)], lambda tile: cell, 64 * STRIDE)
    return run


def admit(run: VirtualRun, name: str, tiles: int, layers: int, suffix: int = 8) -> None:
    spec = make_spec(
        256 * tiles, 256 * tiles + suffix, layers=layers, chunk=256, grid=GRID, request_id=name
    )
    run.admit(spec, [Coverage("link", ((1 << layers) - 1,) * tiles, STRIDE)])


@pytest.mark.parametrize(("last", "waits"), [(0.45, True), (0.9, False)])
def test_a_long_layer_is_not_begun_right_before_a_suffix(last: float, waits: bool) -> None:
    """The last load of one request lands a moment after compute is done with it. If the other one
    loses less by that moment than this one would by a layer of the other's, compute waits."""
    run = run_of(1.0, 10.0)
    run.links["link"].bandwidth = STRIDE / (1.0 + last)
    for layer in range(8):  # the link is known to be as it is now
        run.scheduler.channel("link").started(-1 - layer, STRIDE, run.clock.now())
        run.clock.advance(1.0 + last)
        run.scheduler.channel("link").ended(-1 - layer, run.clock.now(), delivered=True)
    start = run.clock.now()
    admit(run, "a", 2, 1)
    admit(run, "b", 6, 1)
    run.run("a", "b")
    ended = run.finished_at["a"] - start
    assert (ended < 1.6) == waits, ended


def test_a_load_on_time_is_not_raced() -> None:
    """All cells of a batch in flight arrive before compute would have them again: nothing that was
    loaded is computed too."""
    run = run_of(1.0, 1.0, "makespan")
    for name in ("a", "b"):
        admit(run, name, 3, 3, suffix=1)
    start = run.clock.now()
    run.run("a", "b")
    loads = sum(source == "link" for *_, source in run.writes)
    assert loads == 9
    assert run.compute_busy - 9.0 < 0.1
    assert max(run.finished_at.values()) - start < 9.1


def test_a_load_that_hangs_is_raced() -> None:
    """A load never answers: its cell is computed before long, and the suffix after it."""
    run = run_of(1.0, 1.0)
    run.links["link"].outcome = lambda load: None
    start = run.clock.now()
    admit(run, "a", 1, 3)
    run.run("a")
    assert run.finished_at["a"] - start < 10.0
    assert all(source != "link" for *_, source in run.writes)

"""What was learned long ago, or by another process, is tried out once and then trusted again."""

from __future__ import annotations

from typing import Final

import pytest

from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid

LAYERS: Final = 64
STRIDE: Final = 1 << 20
LAYER: Final = 1e-3
"""Seconds: recompute alone takes 128 of them."""
FAST: Final = 4 * LAYERS * STRIDE / (0.3 * LAYER)
"""Bytes a second at which compute would not get through a layer before all is loaded."""
SLOW: Final = 4 * LAYERS * STRIDE / (2 * LAYER)
"""Here it would get through one or two, and would save too little to begin."""


def new_run(bandwidth: float, layer: float = LAYER) -> VirtualRun:
    """A scheduler in a new process, with what another one knew: ``LAYER`` and the bandwidth."""
    run = VirtualRun(lambda tile: layer * tile.width / 512, {"link": Link(bandwidth)})
    for tile in TileGrid((), 512).split(0, 1024) * 50:
        run.compute.observe(tile, LAYER)
    model = run.scheduler.channel("link")
    for i in range(20):
        model.started(-1 - i, 4 * STRIDE, run.clock.now())
        run.clock.advance(4 * STRIDE / bandwidth)
        model.ended(-1 - i, run.clock.now(), delivered=True)
    return run


def restore(run: VirtualRun, name: str, layers: int = LAYERS) -> list[str]:
    """The sources of all cells of one more restore."""
    spec = make_spec(1024, 1025, layers=layers, grid=TileGrid((), 512), request_id=name)
    run.admit(spec, [Coverage("link", ((1 << layers) - 1,) * 4, STRIDE)])
    run.run(name)
    run.settle()
    return [source for request, _, _, source in run.writes if request == name]


def test_one_layer_is_tried_and_not_again_for_a_while() -> None:
    """Compute that is as slow as it is said to be pushes one layer a minute; all else is loaded."""
    run = new_run(SLOW)
    counts = [restore(run, name).count("recompute") for name in "ab"]
    run.clock.advance(61.0)
    assert [*counts, restore(run, "c").count("recompute")] == [1, 0, 1]


def test_nothing_is_tried_that_would_end_after_the_loads() -> None:
    """Where a layer takes longer than all loads, a try would only keep the first token waiting."""
    run = new_run(FAST)
    assert set(restore(run, "a")) == {"link"}


def test_compute_that_is_faster_than_believed_takes_its_share() -> None:
    """Fifty times faster: the first layer shows it, and compute goes on from there."""
    run = new_run(SLOW, LAYER / 50)
    assert restore(run, "a").count("recompute") > LAYERS / 2


@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("believed", [10, 30, 100])
def test_a_link_that_was_slow_once_is_asked_again(layers: int, believed: int) -> None:
    """Believed so slow that a short request has no use for one load of it: now and then one is
    tried all the same, and then the link is used for what it is. Where it is as slow as believed
    that costs nothing: compute overtakes the load."""
    alone = 2 * layers * LAYER * (1 + 1 / 1024)
    even = 4 * layers * STRIDE / (layers * 2 * LAYER)
    for bandwidth in (3 * even, even / believed):
        run = new_run(even / believed)
        run.links["link"].bandwidth = bandwidth
        counts = []
        for name in "abc":
            run.clock.advance(61.0)
            start = run.clock.now()
            counts.append(restore(run, name, layers).count("link"))
            assert run.finished_at[name] - start < alone + 1e-6
        if bandwidth > even:
            assert min(counts[1:]) > layers
        else:
            assert max(counts) <= 1

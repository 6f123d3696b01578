"""Narrow leading tiles are recomputed in rows with the wide ones behind them, where that pays."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import fluid_seconds
from cacheflow.scheduling.planned import Planned
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.scheduling.policies.staircase import best_staircase
from cacheflow.scheduling.rows import NO_ROWS, Rows, dense_tiles
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, Tile, TileGrid
from tests.unit.scheduling.harness import options, warm
from tests.unit.scheduling.oracle import Job, restore_optimum, staircases

GRID: Final = TileGrid()
LAYERS: Final = 16
STRIDE: Final = 1 << 20
LAUNCH: Final = 1024
"""Tokens' worth: a tile of 512 costs twice as much a token as one of 2,048."""
PREFIX: Final = 4096
SPEC: Final = make_spec(PREFIX, PREFIX + 16, layers=LAYERS, request_id="r")
ROWS: Final = Rows.of(len(SPEC.tiles), LAYERS)


def cost(tile: Tile) -> float:
    """A layer on a machine that reaches half its speed with 1,024 tokens."""
    return 1e-6 * (tile.width + LAUNCH) * (1 + 2e-5 * (tile.start + tile.width / 2))


SUFFIX: Final = LAYERS * cost(SPEC.suffix[0])

# -- which tiles -------------------------------------------------------------------------------


@given(
    widths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    launch=st.floats(0.0, 8.0),
    attention=st.floats(0.0, 0.5),
)
def test_rows_end_where_a_token_is_cheapest(
    widths: list[int], launch: float, attention: float
) -> None:
    """No other leading tiles cost less a token together, by more than what rows must be worth."""
    starts = accumulate(widths, initial=0)
    seconds = [
        launch + width * (1 + attention * (start + width / 2))
        for width, start in zip(widths, starts, strict=False)
    ]
    rates = [s / w for s, w in zip(accumulate(seconds), accumulate(widths), strict=True)]
    tiles = dense_tiles(widths, seconds)
    if tiles:
        assert rates[tiles - 1] == pytest.approx(min(rates))
        assert rates[tiles - 1] < rates[0] / 1.03
    else:
        assert min(rates) * 1.03 >= rates[0] * (1 - 1e-9)


def test_there_are_no_rows_where_only_attention_makes_a_difference() -> None:
    """Then every tile is dearer a token than the one before."""
    assert dense_tiles([512, 512, 1024, 2048], [512.0, 515.0, 1040.0, 2110.0]) == 0
    assert dense_tiles([], []) == dense_tiles([512], [0.0]) == 0


def test_a_row_is_some_of_the_layers() -> None:
    rows = Rows.of(3, 32)
    assert (rows.first(0), rows.first(3), rows.first(4), rows.behind(5)) == (0, 0, 4, 8)
    assert Rows.of(3, 5).layers == NO_ROWS.layers == 1


# -- the plan of a staircase -------------------------------------------------------------------


@given(
    widths=st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=4),
    layers=st.integers(1, 4),
    launch=st.floats(0.0, 4.0),
    load=st.floats(0.2, 4.0),
)
def test_the_planned_staircase_is_within_a_cell_of_the_best(
    widths: list[int], layers: int, launch: float, load: float
) -> None:
    """Of all staircases, though tiles get cheaper a token before attention makes them dearer."""
    widths = sorted(widths)
    compute = [launch + width for width in widths]
    loads = [load * width for width in widths]
    heights = best_staircase(Planned(layers, compute, loads, 0.0, 0.0))
    assert heights in {tuple(sum(h > t for h in each) for t in range(len(widths)))
                       for each in staircases(len(widths), layers)}  # fmt: skip
    ours = max(
        sum(cost * height for cost, height in zip(compute, heights, strict=True)),
        sum(each * (layers - height) for each, height in zip(loads, heights, strict=True)),
    )
    job = Job(tuple((c,) * layers for c in compute), tuple((each,) * layers for each in loads))
    cell = max(map(min, compute, loads))
    assert ours <= restore_optimum(job) + cell + 1e-9


# -- a restore ---------------------------------------------------------------------------------


class Restore:
    """What came of one request: seconds to its first token, recomputed layers of each tile."""

    def __init__(self, run: VirtualRun, start: float) -> None:
        self.ttft = run.finished_at["r"] - start
        self.heights = [0] * len(SPEC.tiles)
        for _, tile, _, source in run.writes:
            self.heights[tile] += source == "recompute"
        self.cells = len(run.writes)


def restore(ratio: float, *, holes: frozenset[tuple[int, int]] = frozenset()) -> Restore:
    """Warm, loads ``ratio`` times as fast as recompute; ``holes``: (chunk, layer)."""
    spec = SPEC
    seconds = sum(map(cost, spec.tiles))
    chunks = PREFIX // spec.chunk_tokens
    link = Link(ratio * chunks * STRIDE / seconds)
    run = VirtualRun(cost, {"link": link}, linear=1.0, attention=2e-5, **options("mean"))
    warm(run, [*spec.tiles, GRID.tile(4), Tile(0, 512, 528)], cost, 8 * STRIDE)
    full = (1 << LAYERS) - 1
    there = [full] * chunks
    for chunk, layer in holes:
        there[chunk] &= ~(1 << layer)
    start = run.clock.now()
    run.admit(spec, [Coverage("link", tuple(there), STRIDE)], "adaptive")
    run.run("r")
    return Restore(run, start)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_compute_goes_row_by_row(ratio: float) -> None:
    """The recomputed cells are the lowest layers of all tiles, narrow and wide."""
    took = restore(ratio).heights
    assert max(took) - min(took) <= ROWS.layers
    assert 0 < min(took) < LAYERS


def test_rows_are_worth_having(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1:1 the narrow tiles alone keep compute busy to the end, for fewer tokens; row by row the
    first token is within a cell of the bound over all staircases."""
    by_rows = restore(1.0)
    monkeypatch.setattr(Adaptive, "rows", False)
    by_tiles = restore(1.0)
    assert by_tiles.heights[0] == LAYERS
    assert by_tiles.heights[-1] == 0
    assert by_rows.ttft < 0.95 * by_tiles.ttft
    seconds = [cost(tile) for tile in SPEC.tiles for _ in range(LAYERS)]
    loads = [tile.width * sum(seconds) / PREFIX / LAYERS for tile in SPEC.tiles]
    bound = fluid_seconds(seconds, [each for each in loads for _ in range(LAYERS)])
    assert bound <= by_rows.ttft <= bound + cost(SPEC.tiles[-1]) + SUFFIX


def test_a_hole_in_a_row_is_computed_without_waiting_for_the_others() -> None:
    """The first tile has to be pushed through all layers, whatever the tiles behind it do. (Row by
    row it would wait for them to be loaded: a quarter more.)"""
    found = restore(6.0, holes=frozenset({(0, LAYERS - 1)}))
    assert found.cells == LAYERS * len(SPEC.tiles)
    assert found.ttft <= 1.02 * LAYERS * cost(SPEC.tiles[0]) + SUFFIX

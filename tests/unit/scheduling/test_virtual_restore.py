"""The scheduler driven to the end in virtual time, over random instances."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import fluid_seconds
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from cacheflow.types import Load, RequestSpec, Tile

pytestmark = pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways

LAYERS = 30
STRIDE = 1 << 20
LINEAR, ATTENTION = 1e-4, 1e-7


def layer_seconds(tile: Tile) -> float:
    return tile.width * (LINEAR + ATTENTION * (tile.start + tile.width / 2)) / LAYERS


def full(spec: RequestSpec) -> Coverage:
    chunks = spec.prefix_tokens // spec.chunk_tokens
    return Coverage("link", ((1 << spec.num_layers) - 1,) * chunks, STRIDE)


def recompute_seconds(spec: RequestSpec) -> float:
    return sum(layer_seconds(tile) for tile in spec.tiles) * LAYERS


def fluid(spec: RequestSpec, bandwidth: float) -> float:
    cells = [tile for tile in spec.tiles for _ in range(LAYERS)]
    compute = [layer_seconds(tile) for tile in cells]
    return fluid_seconds(compute, [STRIDE * (t.width // 256) / bandwidth for t in cells])


def new_run(bandwidth: float, link: Link | None = None) -> VirtualRun:
    links = {"link": link or Link(bandwidth, latency=1e-4)}
    return VirtualRun(layer_seconds, links, linear=LINEAR, attention=ATTENTION)


@pytest.mark.parametrize("prefix", [256, 512, 1024, 2048, 4096, 8192, 32768])
@pytest.mark.parametrize("ratio", [1 / 20, 1 / 10, 1 / 3, 1.0, 3.0, 10.0, 20.0, 100.0])
def test_warm_restore_is_never_worse_than_the_better_single_way(prefix: int, ratio: float) -> None:
    """Once costs are known, both ends together lose to neither, and are near the fluid bound."""
    spec = make_spec(prefix, prefix + 1, layers=LAYERS)
    total = STRIDE * LAYERS * prefix // 256
    alone = recompute_seconds(spec)
    run = new_run(total * ratio / alone)
    for name in ("warm-up", "again"):
        spec = make_spec(prefix, prefix + 1, layers=LAYERS, request_id=name)
        start = run.clock.now()
        run.admit(spec, [full(spec)])
        run.run(name)
        seconds = run.restored_at[name] - start
    better = min(alone, alone / ratio)
    assert seconds <= better * 1.03 + 0.002
    if prefix >= 4096 and 1 / 3 <= ratio <= 3:
        assert fluid(spec, total * ratio / alone) / seconds >= 0.96


@pytest.mark.parametrize("ratio", [1 / 100, 1.0, 100.0])
def test_cold_restore_loses_at_most_a_layer_block_and_a_load_unit(ratio: float) -> None:
    """With nothing known, only what cannot be taken back is lost."""
    spec = make_spec(4096, 4097, layers=LAYERS)
    total, alone = STRIDE * LAYERS * 16, recompute_seconds(spec)
    bandwidth = total * ratio / alone
    run = new_run(bandwidth)
    run.admit(spec, [full(spec)])
    run.run("r")
    unit = STRIDE * 8 / bandwidth
    block = max(layer_seconds(tile) for tile in spec.tiles)
    assert run.restored_at["r"] <= min(alone, alone / ratio) + block + unit


@given(
    chunks=st.integers(1, 40),
    holes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 2**LAYERS - 1)), max_size=12),
    ratio=st.floats(0.05, 20),
    seed=st.integers(0, 2**32),
    failing=st.floats(0, 0.6),
    hanging=st.booleans(),
)
def test_every_cell_is_made_ready_exactly_once(
    chunks: int,
    holes: list[tuple[int, int]],
    ratio: float,
    seed: int,
    failing: float,
    hanging: bool,
) -> None:
    """Holes anywhere, loads failing or never answering: each cell has one writer, none is left."""
    spec = make_spec(chunks * 256, chunks * 256 + 5, layers=LAYERS)
    layers = [(1 << LAYERS) - 1] * chunks
    for chunk, mask in holes:
        if chunk < chunks:
            layers[chunk] &= mask
    chance = random.Random(seed)

    def outcome(load: Load) -> bool | None:
        if chance.random() >= failing:
            return True
        return None if hanging else False

    bandwidth = STRIDE * LAYERS * chunks * ratio / recompute_seconds(spec)
    run = new_run(bandwidth, Link(bandwidth, 1e-4, outcome))
    run.admit(spec, [Coverage("link", tuple(layers), STRIDE)])
    run.run("r", limit=1e7)
    cells = [(tile, layer) for _, tile, layer, _ in run.writes]
    assert len(cells) >= len(set(cells)) == len(spec.tiles) * LAYERS
    computed = [(tile, layer) for _, tile, layer, source in run.writes if source == "recompute"]
    loaded = {(tile, layer) for _, tile, layer, source in run.writes if source != "recompute"}
    assert len(computed) == len(set(computed))
    assert not loaded & set(computed)


@given(chunks=st.integers(1, 40), ratio=st.floats(0.05, 20))
def test_without_holes_the_recomputed_set_is_a_staircase(chunks: int, ratio: float) -> None:
    """Layer by layer, recompute takes a prefix of the tiles, never more of a higher layer."""
    spec = make_spec(chunks * 256, chunks * 256 + 5, layers=LAYERS)
    bandwidth = STRIDE * LAYERS * chunks * ratio / recompute_seconds(spec)
    run = new_run(bandwidth)
    run.admit(spec, [full(spec)])
    run.run("r")
    taken = {(tile, layer) for _, tile, layer, source in run.writes if source == "recompute"}
    heights = [sum((t, layer) in taken for t in range(len(spec.tiles))) for layer in range(LAYERS)]
    assert heights == sorted(heights, reverse=True)
    for layer, height in enumerate(heights):
        assert all((t, layer) in taken for t in range(height))


def test_a_channel_that_never_answers_costs_next_to_nothing() -> None:
    """Recompute passes through claimed cells as soon as it reaches them."""
    spec = make_spec(4096, 4097, layers=LAYERS)
    run = new_run(1.0, Link(1e9, outcome=lambda load: None))
    run.admit(spec, [full(spec)])
    run.run("r")
    assert run.restored_at["r"] <= recompute_seconds(spec) * 1.05


def test_a_warm_channel_that_starts_to_hang_is_raced() -> None:
    """A link so fast that recompute was not begun stops answering: compute takes over."""
    alive = True
    link = Link(1e12, 1e-5, lambda load: True if alive else None)
    run = new_run(0.0, link)
    for name in ("a", "b"):
        spec = make_spec(4096, 4097, layers=LAYERS, request_id=name)
        run.admit(spec, [full(spec)])
        run.run(name)
    alive = False
    spec = make_spec(4096, 4097, layers=LAYERS, request_id="c")
    start = run.clock.now()
    run.admit(spec, [full(spec)])
    run.run("c")
    assert run.restored_at["c"] - start <= recompute_seconds(spec) * 1.05


def test_loads_first_fetch_what_a_hole_depends_on() -> None:
    """A hole's tile can only be computed when all before it is there, so that is loaded first."""
    spec = make_spec(16384, 16385, layers=LAYERS)
    layers = [(1 << LAYERS) - 1] * 64
    layers[20] = 0
    run = new_run(1e3)
    run.admit(spec, [Coverage("link", tuple(layers), STRIDE)])
    load = run.scheduler.next_load("link", 0.0)
    hole = TileGrid().index_at(20 * 256)
    assert load is not None
    assert load.tile == hole - 1

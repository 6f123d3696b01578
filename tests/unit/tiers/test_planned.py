"""Write policy ``planned``: what it leaves out, every plausible restore recomputes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cacheflow.costs import ChannelModel, ChannelProfile, ComputeModel, ComputeProfile
from cacheflow.scheduling.planned import Planned
from cacheflow.scheduling.policies.staircase import best_staircase
from cacheflow.tiers.planned import Margins, PlannedWrites, recomputed_anyway
from cacheflow.tiers.write_policies import WriteAll
from cacheflow.types import KVLayout, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import Tile

CHUNK, LAYERS = 256, 4
GRID = TileGrid()


def cost(launch: float, linear: float, attention: float) -> Callable[[Tile], float]:
    def seconds(tile: Tile) -> float:
        per_token = linear + attention * (tile.start + tile.stop) / 2
        return LAYERS * (launch + per_token * tile.width)

    return seconds


def recomputed_tiles(
    prefix: int, suffix: int, tile_seconds: Callable[[Tile], float], chunk_seconds: float
) -> int:
    """Tokens of the tiles that the best staircase of one scenario recomputes whole."""
    tiles = GRID.split(0, prefix)
    heights = best_staircase(
        Planned(
            num_layers=LAYERS,
            layer_seconds=[tile_seconds(tile) / LAYERS for tile in tiles],
            load_seconds=[tile.width / CHUNK * chunk_seconds / LAYERS for tile in tiles],
            compute_backlog=sum(map(tile_seconds, GRID.split(prefix, prefix + suffix))),
            load_backlog=0.0,
        )
    )
    whole = [tile.stop for tile, h in zip(tiles, heights, strict=True) if h == LAYERS]
    return max(whole, default=0)


def slowed(seconds: Callable[[Tile], float], factor: float) -> Callable[[Tile], float]:
    return lambda tile: factor * seconds(tile)


def test_what_is_left_out_is_recomputed_in_every_scenario_within_the_margins() -> None:
    """Random models, links and prefixes: whatever speeds within the margins the later restore
    meets, its best staircase recomputes all that was not stored; so does that of a longer prefix
    where later suffixes are no dearer."""
    chance = random.Random(4)
    left_out = 0
    for _ in range(300):
        chunks = chance.randrange(1, 120)
        attention = chance.choice([0.0, chance.uniform(0, 2e-8)])
        launch, linear = chance.choice([0.0, 1e-3]), 10 ** chance.uniform(-5, -3)
        compute, load = cost(launch, linear, attention), 10 ** chance.uniform(-3, 0)
        margins = Margins(chance.uniform(1, 3), chance.uniform(1, 3), chance.choice([0, 64, 1024]))
        skipped = recomputed_anyway(chunks * CHUNK, CHUNK, GRID, compute, load, margins)
        left_out += skipped > 0
        assert 0 <= skipped <= chunks
        for _ in range(8):
            longer = chunks if attention else chunks + chance.choice([0, chance.randrange(40)])
            got = recomputed_tiles(
                longer * CHUNK,
                chance.randrange(margins.suffix_tokens + 1),
                slowed(compute, chance.uniform(0.2, margins.compute)),
                load / chance.uniform(0.2, margins.link),
            )
            assert got >= skipped * CHUNK
    assert left_out > 50


def test_without_margins_it_is_the_frontier_itself() -> None:
    """The bound is not only safe: with nothing uncertain it leaves out all but the meeting tile."""
    chance = random.Random(5)
    for _ in range(200):
        prefix = CHUNK * chance.randrange(8, 120)
        compute, load = cost(0.0, 10 ** chance.uniform(-5, -3), 1e-8), 10 ** chance.uniform(-3, 0)
        exact = recomputed_tiles(prefix, 0, compute, load)
        skipped = CHUNK * recomputed_anyway(prefix, CHUNK, GRID, compute, load, Margins(1, 1, 0))
        assert skipped in (exact, GRID.start(max(GRID.index_at(exact) - 1, 0)), 0)
        if exact > 0.1 * prefix:
            assert skipped >= exact - GRID.tail


def test_a_fast_link_stores_everything_and_a_slow_one_leaves_out_the_head() -> None:
    """The slower the link the more is left out; never the last tile of the prefix."""
    compute = cost(0.0, 1e-4, 1e-8)
    counts = [
        recomputed_anyway(64 * CHUNK, CHUNK, GRID, compute, seconds)
        for seconds in (1e-3, 1e-1, 0.5, 2.0, 1e3)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert 0 < counts[-1] < 64


def policy(bandwidths: list[float | None], linear: float | None = 1e-12) -> PlannedWrites:
    costs = ComputeModel(1e9, 1e4)
    if linear is not None:
        costs.prime(ComputeProfile(0.0, linear, linear, typical=0.1))
    channels = []
    for bandwidth in bandwidths:
        channels.append(ChannelModel())
        if bandwidth is not None:
            channels[-1].prime(ChannelProfile(0.0, 1 / bandwidth, 1e6))
    layout = KVLayout(LAYERS, 2, 64, "bfloat16", CHUNK)
    return PlannedWrites(costs, channels, layout, GRID)


def test_planned_goes_by_all_channels_together_and_only_by_what_is_known() -> None:
    """A fast tier beside the slow one makes every head worth storing; so does not knowing the
    speed of one of them, or of compute."""
    assert policy([1e5]).skipped(64) > 0
    assert policy([1e5, 1e12]).skipped(64) == 0
    assert policy([1e5, None]).skipped(64) == 0
    assert policy([]).skipped(64) == 0
    assert policy([1e5], linear=None).skipped(64) == 0
    assert policy([1e5]).skipped(0) == 0


def test_all_stores_everything() -> None:
    """As its name says."""
    assert WriteAll().skipped(1000) == 0

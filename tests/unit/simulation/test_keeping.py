"""Simulated stores keep what real tiers would keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheflow.simulation import Channel, Scenario, Synthetic, load_link, load_machine, simulate
from cacheflow.simulation.keeping import BlockStore, Keeping
from cacheflow.simulation.traces import generate_trace, parse_trace
from cacheflow.types import Tile, TileGrid

GRID = TileGrid(head=(), tail=1024)


def seconds(tile: Tile) -> float:
    return tile.width * 1e-3


def keeping(eviction: str, writes: str, load: float = 0.25) -> Keeping:
    """A block of 512 tokens takes half a second to recompute and ``load`` to load."""
    return Keeping.of(eviction, writes, 512, GRID, seconds, load)  # type: ignore[arg-type]


def test_lru_keeps_heads_and_cost_aware_keeps_tails() -> None:
    """Of a request that does not fit, servers that need contiguous prefixes keep the beginning;
    where recompute and loads meet, the end is worth more."""
    for eviction, kept in (("lru", range(8)), ("cost-aware", range(24, 32))):
        store = BlockStore(8, keeping(eviction, "all", 0.5))
        store.add(range(32))
        store.add(range(100, 104))
        assert len(store) == 8
        assert len(set(kept) & {block for block in range(32) if block in store}) >= 4, eviction


def test_planned_writes_leave_heads_out() -> None:
    """What every plausible restore recomputes is never stored, and never evicts anything."""
    store = BlockStore(None, keeping("lru", "planned", 4.0))
    store.add(range(64))
    assert 0 not in store
    assert 63 in store
    assert store.look_up([0, 63]) == [False, True]


def test_a_piece_of_a_tile_remains_one() -> None:
    """So does what is computed behind it: it was loaded, and the grid would have made other bits
    of its tile. What the grid's own passes made is no piece."""
    store = BlockStore(None, keeping("cost-aware", "all"))
    assert store.add(range(3)) == [0, 1, 2]
    assert store.add(range(4)) == [3]
    assert store.add(range(8)) == [4, 5, 6, 7]
    assert [store.is_piece(block) for block in range(9)] == [False] * 2 + [True] * 6 + [False]


def test_a_store_never_holds_more_than_its_capacity() -> None:
    """Whatever comes, in whatever order."""
    store = BlockStore(5, keeping("cost-aware", "all"))
    for first in range(0, 60, 3):
        store.add(range(first, first + 7))
        assert len(store) <= 5


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_knowing_costs_beats_recency_where_it_is_tight() -> None:
    """Conversations that grow, over stores for half of their blocks: cost-aware eviction with
    planned writes gives earlier first tokens than LRU with everything stored (a fixed trace; the
    table over links and capacities is benchmarks/bench_placement.py)."""
    jobs = list(parse_trace(generate_trace(120, seed=1, gap_ms=2000, conversations=12), "made up"))
    blocks = len({block for job in jobs for block in job.leaves}) // 2
    link = Channel(load_link("25gbps"))
    scenario = Scenario(load_machine("h100:llama-3.1-8b"), (link,), shared_blocks=blocks)

    def mean(placed: Scenario) -> float:
        return simulate(placed, Synthetic("made up", jobs), "adaptive").summary.ttft.mean

    aware = mean(replace(scenario, eviction="cost-aware", writes="planned"))
    assert aware < 0.9 * mean(scenario)

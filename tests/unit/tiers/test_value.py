"""What an object is worth: dearer further back, nothing where every restore recomputes it."""

from __future__ import annotations

from math import exp

import pytest

from cacheflow.costs import ChannelModel, ChannelProfile, ComputeModel, ComputeProfile
from cacheflow.testing.objects import make_object
from cacheflow.tiers.value import CostValue, chance_of_loading
from cacheflow.types import KVLayout, Tile, TileGrid, TransferStatus
from tests.unit.tiers.shelf import Shelf, rig

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=256)
GRID = TileGrid()


def value(bandwidth: float | None) -> CostValue:
    """A token costs 1 us a layer at position 0 and 2 us at 8,192."""
    compute = ComputeModel(1.0, 1 / 8192)
    compute.prime(ComputeProfile(launch=0.0, linear=1e-6, attention=1e-6, typical=1e-3))
    channel = ChannelModel()
    if bandwidth is not None:
        channel.prime(ChannelProfile(0.0, 1 / bandwidth, 1e6))
    it = CostValue(compute, LAYOUT, GRID)
    it.loads_over([channel])
    return it


def test_a_byte_is_worth_the_recompute_it_saves() -> None:
    """Twice as much where a token costs twice as much, half as much where it takes twice the
    bytes; before anything was measured the dimensions of the model say how."""
    cells, nbytes = 1024, LAYOUT.payload_bytes()
    for it in (value(1e6), CostValue(ComputeModel(1.0, 1 / 8192), LAYOUT, GRID)):
        head = it.per_byte(0, 512, cells, nbytes)
        tail = it.per_byte(8192, 8704, cells, nbytes)
        assert tail / head == pytest.approx((1 + 8448 / 8192) / (1 + 256 / 8192))
        assert it.per_byte(0, 512, cells, 2 * nbytes) == head / 2


def test_what_is_recomputed_anyway_is_no_evidence() -> None:
    """On a link as fast as compute the head is hardly ever loaded and the tail always is; on one
    that is far faster nearly all is loaded, on one that is far slower nearly nothing."""
    seconds = LAYOUT.payload_bytes() / (4 * 256 * 1.5e-6)
    even = value(seconds).evidence(32)
    assert even[0] < 0.05
    assert even[31] == 1.0
    assert list(even) == sorted(even)
    assert sum(value(100 * seconds).evidence(32)) > 30
    assert sum(value(0.01 * seconds).evidence(32)) < 9, "but for the last tile"


def test_unknown_speeds_count_every_use() -> None:
    """Nothing is taken for worthless before channels and compute were measured."""
    assert value(None).evidence(5) == (1.0,) * 5
    assert CostValue(ComputeModel(1.0, 1.0), LAYOUT, GRID).evidence(3) == (1.0,) * 3


def test_chunks_count_from_where_compute_and_loads_meet() -> None:
    """By the speeds as they are, and all chunks of a tile alike: before that the less, the longer a
    suffix has to be for the tile to be loaded all the same (1,024 tokens are usual)."""

    def tile_seconds(tile: Tile) -> float:
        return tile.width * 1e-3

    chances = chance_of_loading(40, 256, TileGrid((), 2048), tile_seconds, 0.25)
    spare = (32 * 0.25 - 2.048, 24 * 0.25 - 4.096)
    head, next_to_it = (exp(-seconds / 1.024) for seconds in spare)
    assert chances[8:] == pytest.approx((next_to_it,) * 8 + (1.0,) * 24), (
        "the third tile is where they meet"
    )
    assert chances[:8] == (0.01,) * 8, "no less than that"
    assert head < 0.01
    assert chance_of_loading(0, 256, GRID, tile_seconds, 0.25) == ()


class Tails:
    """Only the last chunk of a request is ever loaded."""

    def per_byte(self, start: int, stop: int, cells: int, nbytes: int) -> float:
        return 1.0

    def evidence(self, chunks: int) -> list[float]:
        return [0.01] * (chunks - 1) + [1.0]


async def test_a_tier_keeps_what_restores_load() -> None:
    """Chunks that were looked up as the head of a request leave before its tail, whether they were
    stored before that lookup or after it."""
    async with rig(Shelf(), objects=4, eviction="cost-aware") as r:
        r.tier._stock.value = Tails()
        assert await r.found(0, 1, 2) == []
        assert await r.store(2, 1, 0) == [TransferStatus.OK] * 3
        await r.store(3, 4, 5)
        assert make_object(2).key in r.shelf.objects
        assert make_object(0).key not in r.shelf.objects


async def test_of_a_prompt_what_is_there_ends_what_a_restore_loads() -> None:
    """What many prompts begin with is the head of each, but the end of all that can be loaded for
    those of which nothing else is there: it is used in full, and stays."""
    async with rig(Shelf(), objects=3, eviction="cost-aware", lease_seconds=0.1) as r:
        r.tier._stock.value = Tails()
        assert await r.found(0, 1) == []
        for number in (0, 8, 9):
            await r.store(number)
        for new in (20, 30, 40):
            assert await r.found(0, new, new + 1) == [0]
        r.clock.advance(1.0)
        await r.store(10, 11)
        assert 0 in r.there


async def test_what_a_save_asks_about_lies_where_it_lies_in_its_prompt() -> None:
    """Not where it lies among the chunks that are asked about: the second of four chunks is no
    tail because nothing behind it is to be stored, and leaves before what came in earlier."""
    async with rig(Shelf(), objects=2, eviction="cost-aware") as r:
        r.tier._stock.value = Tails()
        prompt = [make_object(number).key.chunk for number in range(4)]
        assert await r.tier.survey(prompt, [0, 1]) == [[], []]
        for number in (8, 1, 9):
            await r.store(number)
        assert r.there == [8, 9]


async def test_a_request_that_is_saved_has_used_what_it_found_once() -> None:
    """Its lookup is the use; the save that follows counts none. A turn that went on in memory was
    never looked up: there the save is the use, once each."""
    async with rig(Shelf(), eviction="cost-aware", lease_seconds=10.0) as r:
        await r.store(0, 1)
        [entry] = r.tier.catalogue.of(make_object(1).key.chunk)
        prompt = [make_object(number).key.chunk for number in range(2)]
        assert await r.found(0, 1) == [0, 1]
        assert [len(infos) for infos in await r.tier.survey(prompt, [0, 1])] == [1, 1]
        assert entry.uses == 1
        r.clock.advance(10.0)
        await r.tier.survey(prompt, [1])
        assert (entry.uses, entry.last_use) == (2, r.clock.now())


async def test_one_part_of_a_prompt_does_not_make_way_for_another() -> None:
    """A full tier keeps what a save finds there, instead of storing its other chunks over it, turn
    after turn."""
    async with rig(Shelf(), objects=2) as r:
        await r.store(0, 1)
        prompt = [make_object(number).key.chunk for number in range(3)]
        assert [len(infos) for infos in await r.tier.survey(prompt, [0, 1, 2])] == [1, 1, 0]
        await r.store(2)
        assert r.there == [0, 1]


async def test_a_full_tier_declines_what_it_would_give_up_first() -> None:
    """Heads that any restore recomputes are not even copied once the tier is full of tails, and
    that is counted; while there is room, or with another policy, everything is taken."""
    heads = [make_object(number).info.key.chunk for number in range(10, 13)]
    for eviction, declines in (("cost-aware", True), ("lru", False)):
        async with rig(Shelf(), objects=4, eviction=eviction) as r:
            r.tier._stock.value = Tails()
            await r.tier.survey(heads, [0, 1, 2])
            assert not r.tier.declines(heads[0], 0, 256, 1024), "an empty tier takes all there is"
            await r.store(1, 2, 3, 4)
            await r.store(5)  # something has to go from now on
            assert r.tier.declines(heads[0], 0, 256, 1024) is declines
            assert not r.tier.declines(heads[2], 0, 256, 1024), "what restores load comes in"
            assert r.dropped == ({"worth": 1} if declines else {})

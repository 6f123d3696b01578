"""What a rank tells the others before a restore, and what their answers make of its provenance."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cacheflow.restore.job import Job, TileHistory
from cacheflow.restore.meeting import offering, reach
from cacheflow.restore.request import RestoreRequest
from cacheflow.testing.objects import TINY, make_object
from cacheflow.tiers import Located
from cacheflow.types import Coverage, Offering, Segment, Shard, TileGrid

if TYPE_CHECKING:
    from cacheflow.types import ChunkInfo

GRID = TileGrid((64,), 64)
OURS = "conformance 0"
"""Under which grid the tiny objects say they were computed."""


def located(*chunks: tuple[ChunkInfo, ...]) -> dict[str, Located]:
    return {"disk": Located("disk", chunks, Shard.of(TINY))}


def test_what_is_not_computed_here_bit_for_bit_is_strange() -> None:
    """Of another grid, not canonical, or lossy: said chunk by chunk; a chunk that is missing is
    not, for it will be computed."""
    good = make_object(1).info
    elsewhere = replace(good, grid_id="another")
    decoded = replace(good, canonical=False)
    lossy = replace(good, canonical=False, lossy=True)
    request = RestoreRequest("r", [0] * 99, (), 0.0, resident=7)
    found = offering(request, located((good,), (elsewhere,), (), (decoded,), (good, lossy)), OURS)
    assert (found.strange, found.lossy) == (0b11010, 0b10000)
    assert found.coverage[0].layers == (7, 7, 0, 7, 7)
    assert (found.subject, found.resident) == ("99 tokens, last key none", 7)


def test_reach_ends_with_the_last_chunk_that_all_have() -> None:
    assert reach(Offering((Coverage("a", (1, 0, 2, 0), 1), Coverage("b", (0, 4), 1)))) == 3
    assert reach(Offering(())) == 0


@pytest.mark.parametrize(("strange", "widths"), [(0, [64, 64]), (0b0001, [0, 64]), (8, [64, 0])])
async def test_what_another_rank_has_loaded_counts(strange: int, widths: list[int]) -> None:
    """A tile into which any rank loads a strange copy is canonical nowhere, whoever else computed
    all of it: what all compute next depends on it."""
    spec = RestoreRequest("r", [0] * 129, (), 0.0).spec(TINY, GRID)
    spec = replace(spec, prefix_tokens=128, tiles=GRID.split(0, 128), suffix=GRID.split(128, 129))
    job = Job(
        RestoreRequest("r", [0] * 129, (), 0.0), spec, asyncio.get_running_loop().create_future()
    )
    job.histories = [TileHistory(set(range(TINY.num_layers))) for _ in spec.tiles]
    job.agreed = Offering((), strange, lossy=0b1000)
    segments = job.provenance(OURS)
    assert [segment.width for segment in segments] == widths
    assert [segment.lossy for segment in segments] == [False, True]
    assert segments[0] == Segment(0, 64, widths[0])

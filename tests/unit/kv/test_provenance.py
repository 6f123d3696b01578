"""Which tokens a recompute repeats bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import ConfigError
from cacheflow.kv import canonical_tokens, clip_segments, make_grid_id
from cacheflow.types import Segment, Span, TileGrid

GRID = TileGrid()
TILES = [Segment(0, 512, 512), Segment(512, 1024, 512), Segment(1024, 2048, 1024)]


def test_whole_tiles_from_the_start_are_canonical() -> None:
    """Up to the first segment that is not a whole tile."""
    assert canonical_tokens(TILES, GRID) == 2048
    assert canonical_tokens([*TILES, Segment(2048, 3000, 952)], GRID) == 2048
    assert canonical_tokens([], GRID) == 0


def test_canonical_is_inductive() -> None:
    """A whole tile behind a decoded stretch is not: it attended to other bits."""
    decoded = [Segment(0, 500, 500), Segment(500, 512, 1), *TILES[1:]]
    assert canonical_tokens(decoded, GRID) == 0
    assert canonical_tokens([TILES[0], Segment(512, 1024, 1), TILES[2]], GRID) == 512


@given(st.lists(st.integers(1, 3000), max_size=12), st.booleans())
def test_only_whole_tiles_ever_count(widths: list[int], decoded: bool) -> None:
    """Any history: the answer is a tile edge, and every token before it was computed on tiles."""
    edges = [0]
    for width in widths:
        edges.append(edges[-1] + width)
    history = [Segment(a, b, 1 if decoded and a else b - a) for a, b in pairwise(edges)]
    tokens = canonical_tokens(history, GRID)
    tiles = GRID.split(0, tokens)
    assert [(t.start, t.stop, t.width) for t in tiles] == [
        (s.start, s.stop, s.width) for s in history[: len(tiles)]
    ]
    assert tokens == (tiles[-1].stop if tiles else 0)


def test_environments_cannot_be_spelled_alike() -> None:
    """A name that looks like two fields is refused."""
    with pytest.raises(ConfigError, match="';'"):
        make_grid_id(grid=GRID, torch_version="1", device="cpu", attention="a;threads=1", threads=2)


def test_segments_are_kept_whole() -> None:
    """A chunk records the segments it overlaps, uncut."""
    assert clip_segments(TILES, Span(256, 768)) == tuple(TILES[:2])
    assert clip_segments(TILES, Span(512, 768)) == (TILES[1],)


def test_the_grid_id_names_everything_that_decides_bits() -> None:
    """Any difference is another id."""

    def grid_id(grid: TileGrid = GRID, torch: str = "1", device: str = "cpu", threads: int = 1,
                attention: str = "a", parallel: int = 1) -> str:  # fmt: skip
        return make_grid_id(
            grid=grid,
            torch_version=torch,
            device=device,
            attention=attention,
            threads=threads,
            tensor_parallel=parallel,
        )

    ids = {
        grid_id(),
        grid_id(TileGrid((512,), 512)),
        grid_id(torch="2"),
        grid_id(device="cuda"),
        grid_id(threads=2),
        grid_id(attention="b"),
        grid_id(parallel=2),
    }
    assert len(ids) == 7


def test_grid_edges() -> None:
    """512, 512, 1024, then 2048: index, start and split agree everywhere."""
    assert [GRID.start(i) for i in range(6)] == [0, 512, 1024, 2048, 4096, 6144]
    for token in range(0, 10_000, 37):
        tile = GRID.tile(GRID.index_at(token))
        assert tile.start <= token < tile.stop
    pieces = GRID.split(300, 5000)
    assert pieces[0].start == 300
    assert pieces[-1].stop == 5000
    assert [p.stop for p in pieces[:-1]] == [q.start for q in pieces[1:]]
    assert GRID.split(5, 5) == ()

"""How much of a prompt is restored, by what is stored of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheflow.tiers.restorable import restorable
from cacheflow.types import TileGrid

CHUNK = 256
GRID = TileGrid((512, 512, 1024), 2048)
"""Edges at chunks 2, 4, 8, 16, 24."""


def ours(chunks: range) -> bool:
    return False


def of_a_turn(chunks: range) -> bool:
    return True


def test_what_a_turn_left_of_a_tile_is_loaded() -> None:
    """The prefix ends with the last stored chunk, however far the prompt goes on."""
    assert restorable(20, 21, GRID, CHUNK, of_a_turn) == 20
    assert restorable(20, 60, GRID, CHUNK, of_a_turn) == 20


def test_a_tile_of_the_grid_with_a_hole_at_its_end_is_restored_whole() -> None:
    """If the prompt covers it: one that ends inside would compute other bits anyway."""
    assert restorable(20, 24, GRID, CHUNK, ours) == 24
    assert restorable(20, 60, GRID, CHUNK, ours) == 24
    assert restorable(20, 23, GRID, CHUNK, ours) == 20


def test_only_the_copies_in_that_tile_are_asked_for() -> None:
    """All of them, and none before it."""
    asked: list[range] = []

    def strange(chunks: range) -> bool:
        asked.append(chunks)
        return 5 in chunks

    assert restorable(6, 9, GRID, CHUNK, strange) == 6
    assert restorable(7, 9, GRID, CHUNK, strange) == 7
    assert restorable(10, 60, GRID, CHUNK, strange) == 16
    assert asked == [range(4, 6), range(4, 7), range(8, 10)]


@given(st.integers(0, 80), st.integers(0, 80), st.booleans())
def test_nothing_stored_is_left_out_and_nothing_is_made_up(
    stored: int, usable: int, strange: bool
) -> None:
    """All that is stored of the prompt, and at most the rest of one tile."""
    found = restorable(stored, usable, GRID, CHUNK, lambda chunks: strange)
    assert min(stored, usable) <= found <= usable
    if found > min(stored, usable):
        assert not strange
        assert GRID.start(GRID.index_at(found * CHUNK)) == found * CHUNK
        assert GRID.index_at(stored * CHUNK - 1) == GRID.index_at(found * CHUNK - 1)

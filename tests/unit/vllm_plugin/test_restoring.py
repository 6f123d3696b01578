"""What counts as restored: only what is in place, whatever else has arrived or was reported."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow.memory import buffer_from
from cacheflow.plugins.vllm.pieces import Piece
from cacheflow.plugins.vllm.records import Found, Progress
from cacheflow.plugins.vllm.restores import Phase, Restore
from cacheflow.plugins.vllm.restoring import Restoring
from cacheflow.types import Span
from tests.unit.vllm_plugin.minivllm import MiniRequest

BLOCK = 16


class Bytes:
    """A block's bytes outside the cache."""

    buffer = buffer_from(bytearray(8))

    def release(self) -> None:
        """Nobody else has them."""


class Cache:
    """Remembers which blocks were written."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, block_id: int, buffer: object, layers: Span) -> None:
        self.written.append(block_id)


def restoring() -> Restoring:
    restore = Restoring(1, 0, (b"0", b"1", b"2", b"3"), 0.0, 3)
    restore.found = Found(0, 4)
    return restore


def whole(block: int) -> Piece:
    return Piece(block, Span(0, 3))


def test_a_block_that_is_still_being_copied_is_not_there() -> None:
    """Blocks are copied side by side: the lower one may be in place first."""
    memory: Any = Cache()
    restore = restoring()
    restore.aim(memory, 0, (10, 11, 12, 13))
    assert restore.land(whole(3), Bytes())
    assert restore.land(whole(2), Bytes())
    restore.place(memory, 2)
    restore.settle()
    assert (memory.written, restore.low) == ([12], 4)
    restore.place(memory, 3)
    restore.settle()
    assert (memory.written, restore.low) == ([12, 13], 2)


def test_what_has_arrived_counts_before_there_is_a_place() -> None:
    """It is in place as soon as there is one, but for what compute has by then."""
    memory: Any = Cache()
    restore = restoring()
    for block in (3, 2, 1, 0):
        assert not restore.land(whole(block), Bytes())
    restore.settle()
    assert restore.low == 0
    restore.take(1)
    restore.aim(memory, 0, (10, 11, 12, 13))
    assert (sorted(memory.written), restore.low) == ([11, 12, 13], 1)


@pytest.mark.parametrize(("done", "low"), [(0, 0), (2, 1), (16, 1), (17, 2), (33, 3)])
def test_a_block_that_compute_has_begun_is_not_loaded(done: int, low: int) -> None:
    """A report of the time before the race may still say that all of it is there."""
    restore = Restore(1, MiniRequest("r", [1] * 64), (b"0", b"1", b"2", b"3"), 0, "adaptive", 0.0)
    restore.progress = Progress(low=0, waited=0.0)
    assert restore.low(done, BLOCK) == 0
    restore.phase = Phase.RACING
    assert restore.low(done, BLOCK) == low


def test_what_others_have_not_got_is_not_kept() -> None:
    """Another rank has fewer blocks: those above are let go, and what fails there fails nothing."""
    memory: Any = Cache()
    restore = restoring()
    for block in (3, 2):
        restore.land(whole(block), Bytes())
    restore.cut(3)
    assert (restore.low, sorted(restore.held)) == (2, [2])
    assert not restore.wants(3)
    assert not restore.land(whole(3), Bytes())
    restore.fail(3)
    assert not restore.is_over
    restore.aim(memory, 0, (10, 11, 12))
    restore.land(whole(1), Bytes())
    restore.place(memory, 1)
    restore.settle()
    assert (memory.written, restore.low) == ([12, 11], 1)
    restore.fail(0)
    assert restore.is_over


def test_a_block_is_there_when_all_its_layers_are() -> None:
    """Layers that come one after the other count together, and each by itself for who waits."""
    memory: Any = Cache()
    restore = restoring()
    restore.land(whole(3), Bytes())
    restore.aim(memory, 0, (10, 11, 12, 13))
    restore.take(2)
    assert restore.low == 3
    restore.land(Piece(2, Span(0, 2)), Bytes())
    part, row = restore.partial()
    assert (round(part, 2), row) == (0.67, True)
    assert not restore.has(0, 2)  # verified, but not in place
    restore.place(memory, 2)
    restore.settle()
    assert restore.low == 3
    assert [restore.has(layer, 2) for layer in range(3)] == [True, True, False]
    restore.land(Piece(2, Span(2, 3)), Bytes())
    restore.place(memory, 2)
    restore.settle()
    assert (restore.low, restore.is_over) == (2, True)


def test_layers_of_a_block_that_compute_took_are_dropped() -> None:
    """Some layers of it were in place: it does not count, and nothing more is written."""
    memory: Any = Cache()
    restore = restoring()
    restore.aim(memory, 0, (10, 11, 12, 13))
    restore.land(Piece(3, Span(0, 2)), Bytes())
    restore.place(memory, 3)
    restore.take(4)
    assert not restore.land(Piece(3, Span(2, 3)), Bytes())
    restore.settle()
    assert (memory.written, restore.low) == ([13], 4)

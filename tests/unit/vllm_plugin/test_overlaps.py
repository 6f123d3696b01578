"""A forward pass that reads what is still being loaded waits for each layer, and not for long."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.memory import buffer_from
from cacheflow.plugins.vllm.overlaps import Overlaps
from cacheflow.plugins.vllm.pieces import Piece
from cacheflow.plugins.vllm.records import Found, Overlap
from cacheflow.plugins.vllm.restoring import Restoring
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 3
IDS = (10, 11)
LONG = 60.0
"""Longer than any test may take."""


class Bytes:
    """A block's bytes outside the cache."""

    buffer = buffer_from(bytearray(8))

    def release(self) -> None:
        """Nobody else has them."""


class Cache:
    """Takes whatever is written."""

    def write(self, block_id: int, buffer: object, layers: Span) -> None:
        assert block_id in IDS


class Rig:
    """Two blocks that a step reads while they are still being loaded."""

    def __init__(self) -> None:
        self.overlaps = Overlaps(LAYERS, SystemClock())
        self.asked = [threading.Event() for _ in range(LAYERS)]
        self.restore = Restoring(1, 0, (b"0", b"1"), 0.0, LAYERS)
        self.restore.found, self.restore.low = Found(0, 2), 2
        memory: Any = Cache()
        self.memory = memory
        self.restore.aim(memory, 0, IDS)

    def begin(self, seconds: float = LONG) -> None:
        self.overlaps.begin(computes=True)
        self.overlaps.read(self.restore, Overlap(0, IDS, seconds))

    def land(self, block: int, layers: Span) -> None:
        if self.restore.land(Piece(block, layers), Bytes()):
            self.restore.place(self.memory, block)
        self.restore.settle()
        self.overlaps.poke()

    def forward(self) -> list[int]:
        """The layers that were read when all of them was there."""
        sound = []
        for layer in range(LAYERS):
            self.asked[layer].set()
            self.overlaps.wait(layer)
            if self.restore.has(layer, 0):
                sound.append(layer)
        return sound

    def later(self, *acts: Callable[[], None]) -> None:
        """From another thread, once the pass waits."""

        def run() -> None:
            for act in acts:
                act()

        threading.Thread(target=run).start()


def test_each_layer_is_waited_for() -> None:
    """Nothing is read before it is there, and when all was, nothing is to be computed anew."""
    rig = Rig()
    rig.begin()

    def bring(layer: int) -> None:
        assert rig.asked[layer].wait(LONG)
        for block in (1, 0):
            rig.land(block, Span(layer, layer + 1))

    rig.later(*(partial(bring, layer) for layer in range(LAYERS)))
    assert rig.forward() == [0, 1, 2]
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set()
    assert (rig.restore.low, rig.overlaps.take_news()) == (0, True)


def test_a_load_that_fails_lets_the_pass_go_on() -> None:
    """It ends without it, and says which blocks were not there; nothing is copied into them."""
    rig = Rig()
    rig.begin()

    def fail() -> None:
        rig.restore.stop = 1
        rig.overlaps.poke()

    rig.later(lambda: rig.land(1, Span(0, LAYERS)), lambda: rig.land(0, Span(0, 1)), fail)
    assert rig.forward() == [0]
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set(IDS)
    assert not rig.restore.land(Piece(0, Span(1, LAYERS)), Bytes())
    assert rig.restore.is_over
    assert rig.overlaps.take_invalid() == set()


@pytest.mark.parametrize("closed", [False, True])
def test_a_load_that_does_not_come_is_given_up(*, closed: bool) -> None:
    """After its time, or when its restore is over; the next step is not bothered with it."""
    rig = Rig()
    rig.begin(LONG if closed else 0.01)
    if closed:
        rig.restore.end()
    assert rig.forward() == []
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set(IDS)
    rig.overlaps.begin(computes=True)
    rig.forward()
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set()


def test_a_restore_that_is_not_known_is_not_there() -> None:
    """The worker has given it up before it heard that a step reads it."""
    rig = Rig()
    rig.overlaps.begin(computes=True)
    rig.overlaps.read(None, Overlap(0, IDS, LONG))
    rig.forward()
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set(IDS)


def test_a_runner_that_does_not_ask_is_not_believed() -> None:
    """What it read before all was there is computed anew, and the scheduler is told."""
    rig = Rig()
    rig.begin()
    rig.land(1, Span(0, LAYERS))
    rig.land(0, Span(0, LAYERS))
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set(IDS)
    assert rig.overlaps.take_news() is False
    rig.overlaps.begin(computes=False)  # a step without a pass says nothing about it
    rig.overlaps.end()
    assert rig.overlaps.take_invalid() == set()
    assert rig.overlaps.take_news() is None

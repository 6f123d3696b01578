"""Blocks that storage works on belong to nobody else, and only so many of them at a time."""

from __future__ import annotations

from cacheflow.plugins.vllm.pins import Pins
from cacheflow.plugins.vllm.records import SaveOutcome
from cacheflow.plugins.vllm.saves import SaveBook
from cacheflow.types import ChunkKey
from tests.unit.vllm_plugin.minivllm import MiniPool

KEYS = [ChunkKey(bytes([n]) * 32) for n in range(20)]
NOBODY = bytes(16)


def test_a_pin_outlives_the_request() -> None:
    """What a request gives back while it is pinned is free only when the last pin is gone."""
    pool = MiniPool(10)
    pins, ids = Pins(pool), pool.take(3) or []
    pins.pin(ids)
    pins.pin(ids[:1])
    pool.free_blocks([pool.blocks[i] for i in ids])
    assert len(pool.free) == 6
    pins.unpin(ids)
    assert len(pool.free) == 8
    pins.unpin(ids[:1])
    assert (len(pool.free), pins.held) == (9, 0)


def test_pins_are_lifted_for_a_reset() -> None:
    """For a moment the pool looks empty, then everything is held as before."""
    pool = MiniPool(10)
    pins, ids = Pins(pool), pool.take(3) or []
    pins.pin(ids)
    pool.free_blocks([pool.blocks[i] for i in ids])
    with pins.lifted():
        assert len(pool.free) == 9
    assert len(pool.free) == 6
    pins.unpin(ids)
    assert len(pool.free) == 9


def test_saves_take_a_share_of_the_pool() -> None:
    """At most a quarter of the blocks is held for saving; the rest is asked for again, nothing
    twice, and what was dropped once more."""
    pool, book = MiniPool(41), SaveBook(16)
    pins, ids = Pins(pool), pool.take(20) or []
    reached, first = book.plan(0, KEYS, ids, pins, width=1, tenant=NOBODY)
    assert (reached, len(first), pins.held) == (10, 10, 10)
    assert book.plan(10, KEYS[10:], ids[10:], pins, width=1, tenant=NOBODY) == (10, [])
    book.copied([order.save for order in first], pins)
    book.ended([SaveOutcome(order.save, stored=order.save != 1) for order in first[:9]])
    reached, second = book.plan(10, KEYS[10:], ids[10:], pins, width=1, tenant=NOBODY)
    assert (reached, len(second)) == (20, 10)
    book.copied([order.save for order in second], pins)
    book.ended([SaveOutcome(order.save, stored=True) for order in second])
    _, again = book.plan(0, KEYS, ids, pins, width=1, tenant=NOBODY)
    assert [order.key for order in again] == [KEYS[0].digest]  # the tenth is still being stored
    assert [order.start for order in second] == [16 * n for n in range(10, 20)]

"""How long an operation may take, and what is doubted: in virtual time."""

from __future__ import annotations

import pytest

from cacheflow.testing.objects import object_key
from cacheflow.tiers.doubts import Doubts
from cacheflow.tiers.patience import Patience

MB = 1_000_000


def warmed(bandwidth: float, longest: float = 30.0) -> tuple[Patience, float]:
    """Patience with a channel that has delivered a dozen MB, one at a time."""
    patience, now = Patience(longest), 0.0
    for _ in range(12):
        number, _ = patience.begin(MB, now)
        now += MB / bandwidth
        patience.end(number, now, delivered=True)
    return patience, now


def test_what_nothing_is_known_of_has_seconds() -> None:
    """Four seconds, and one more a megabyte, but never more than the longest."""
    assert Patience(30.0).begin(2 * MB, 0.0)[1] == 6.0
    assert Patience(5.0).begin(2 * MB, 0.0)[1] == 5.0


def test_a_fast_channel_has_the_least() -> None:
    """Two seconds: sixteen times a millisecond would be a hiccup of the machine."""
    patience, now = warmed(1e9)
    assert patience.begin(MB, now)[1] == 2.0


def test_a_slow_channel_has_what_it_needs() -> None:
    """Sixteen times what the bytes are expected to take, those before them included."""
    patience, now = warmed(1e6)
    first, seconds = patience.begin(MB, now)
    assert seconds == pytest.approx(16.0, rel=0.1)
    assert patience.begin(MB, now)[1] == pytest.approx(30.0)
    patience.end(first, now + 1.0, delivered=True)


def test_what_was_not_delivered_teaches_no_speed() -> None:
    """A channel that never delivered anything is as unknown as before."""
    patience = Patience(30.0)
    number, seconds = patience.begin(MB, 0.0)
    patience.end(number, 100.0, delivered=False)
    assert patience.begin(MB, 200.0)[1] == seconds


def test_a_doubt_lasts_a_minute_or_until_dispelled() -> None:
    """Then the object is listed again."""
    doubts, key = Doubts(), object_key(1)
    doubts.add(key, 10.0)
    assert doubts.about(key, 69.9)
    assert not doubts.about(key, 70.0)
    assert len(doubts) == 0
    doubts.add(key, 100.0)
    doubts.dispel(key)
    assert not doubts.about(key, 100.0)


def test_doubts_are_bounded() -> None:
    """4,096; the oldest is forgotten first."""
    doubts = Doubts()
    keys = [object_key(number) for number in range(4100)]
    for key in keys:
        doubts.add(key, 0.0)
    assert len(doubts) == 4096
    assert not doubts.about(keys[3], 1.0)
    assert doubts.about(keys[4], 1.0)

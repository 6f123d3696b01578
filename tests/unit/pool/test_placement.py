"""Which stores a chunk belongs to: evenly spread, and only a store's share moves with it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cacheflow.storage_backends.pool.placement import Placement

DIGESTS = [random.Random(seed).randbytes(32) for seed in range(20_000)]
_names = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=8, unique=True)


@given(_names, st.integers(1, 3), st.binary(min_size=32, max_size=32))
def test_the_order_of_names_does_not_matter(names: list[str], replicas: int, digest: bytes) -> None:
    """Every client places alike: as many different stores as there are to be, whatever order they
    were found in."""
    homes = Placement(names, replicas).of(digest)
    assert homes == Placement(list(reversed(names)), replicas).of(digest)
    assert len(set(homes)) == len(homes) == min(replicas, len(names))


@given(_names, st.text(min_size=21, max_size=30), st.integers(1, 3))
def test_only_the_share_of_a_store_moves(names: list[str], joined: str, replicas: int) -> None:
    """When a store joins, a chunk's homes change by that store only; the others keep their order.
    A store that leaves is the same read backwards."""
    before, after = Placement(names, replicas), Placement([*names, joined], replicas)
    for digest in DIGESTS[:50]:
        old, new = before.of(digest), after.of(digest)
        if joined in new:
            assert [name for name in new if name != joined] == list(old[: len(new) - 1])
        else:
            assert new == old


def test_what_moves_is_the_ideal_share_within_five_percent() -> None:
    """A fourth store takes a quarter of the keys (+- 5 % of it), evenly from the three others, and
    each of four stores has a quarter."""
    three = Placement(["a:1", "b:1", "c:1"], 1)
    four = Placement(["a:1", "b:1", "c:1", "d:1"], 1)
    homes = [(three.of(digest)[0], four.of(digest)[0]) for digest in DIGESTS]
    moved = [old for old, new in homes if old != new]
    ideal = len(DIGESTS) / 4
    assert abs(len(moved) - ideal) <= 0.05 * ideal
    assert all(new == "d:1" for old, new in homes if old != new)
    for name in three.names:
        assert abs(moved.count(name) - ideal / 3) <= 0.1 * ideal / 3
    for name in four.names:
        share = sum(new == name for _, new in homes)
        assert abs(share - ideal) <= 0.05 * ideal

"""The eviction policies: what leaves, in which order, and how long that takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.tiers.eviction import CostAware, EvictionName, Lru, S3Fifo, load_eviction

if TYPE_CHECKING:
    from cacheflow.tiers.eviction.protocol import EvictionPolicy

NAMES = get_args(EvictionName)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "victims"]),
        st.integers(0, 11),
        st.integers(1, 40),
    ),
    max_size=80,
)


def nobody(key: int) -> bool:
    return False


@pytest.mark.parametrize("name", NAMES)
@given(steps=_steps, spared=st.frozensets(st.integers(0, 11)))
def test_nothing_is_lost_or_made_up(
    name: EvictionName, steps: list[tuple[str, int, int]], spared: frozenset[int]
) -> None:
    """Whatever happens, a key that came in is there until it is removed or a victim, spared keys
    are never victims, and victims are enough or all that may leave."""
    policy = load_eviction(name, int)
    there: dict[int, int] = {}
    for step, key, number in steps:
        if step == "insert" and key not in there:
            policy.insert(key, number, worth=1.0 + key, uses=1.0 + number % 2)
            there[key] = number
        elif step == "touch":
            policy.touch(key, weight=number / 40, worth=float(number))
        elif step == "remove":
            policy.remove(key)
            there.pop(key, None)
        elif step == "victims":
            victims = policy.victims(number, spared.__contains__)
            assert len(set(victims)) == len(victims)
            assert set(victims) <= there.keys() - spared
            sizes = [there.pop(key) for key in victims]
            assert sum(sizes) >= number or not there.keys() - spared
            assert not sizes or sum(sizes[:-1]) < number, "one more than needed"
        assert len(policy) == len(there)
    assert set(policy.victims(1 << 30, nobody)) == there.keys()
    assert len(policy) == 0


@pytest.mark.no_cover  # the tracer would be what is timed
@pytest.mark.parametrize("name", NAMES)
def test_time_an_operation_does_not_grow_with_the_store(name: EvictionName) -> None:
    """At 100,000 entries an insert, a touch and an eviction take about as long as at 1,000, by the
    time of this thread: the machine may be busy. What grows with the store takes 100 times."""

    def seconds(entries: int) -> float:
        policy = load_eviction(name, int)
        for key in range(entries):
            policy.insert(key, 10, worth=1.0 + key % 97)
        start = time.thread_time()
        for step in range(4000):
            policy.touch(step * 7919 % entries)
            policy.insert(entries + step, 10, worth=1.0 + step % 97)
            assert len(policy.victims(10, nobody)) == 1
        return time.thread_time() - start

    small = min(seconds(1000) for _ in range(3))
    assert seconds(100_000) < 20 * small


def fill(policy: EvictionPolicy[int], *keys: int) -> None:
    for key in keys:
        policy.insert(key, 1)


def test_lru_takes_what_was_not_used_for_longest() -> None:
    """In the order of the last use, whatever came in between; a use of no weight is none."""
    policy = Lru[int]()
    fill(policy, 1, 2, 3, 4)
    policy.touch(1)
    policy.touch(3, weight=0.0)
    assert policy.victims(2, nobody) == [2, 3]
    assert policy.victims(1, lambda key: key == 4) == [1]
    assert policy.victims(9, nobody) == [4]


def test_s3fifo_lets_a_scan_pass_through() -> None:
    """Keys used again survive any number of keys that come once (LRU would lose them all)."""
    policy = S3Fifo[int]()
    hot = range(40)
    fill(policy, *hot)
    for key in (*hot, *hot):
        policy.touch(key)
    lost = []
    for key in range(1000, 1400):
        fill(policy, key)
        if len(policy) > 100:
            lost += policy.victims(1, nobody)
    assert not set(lost) & set(hot)


def test_s3fifo_remembers_who_left_too_early() -> None:
    """What comes back soon after it left the small queue is not put there again."""
    policy = S3Fifo[int]()
    fill(policy, *range(20))
    assert policy.victims(1, nobody) == [0]
    fill(policy, 0)
    assert 0 not in policy.victims(18, nobody)


def test_cost_aware_takes_the_cheapest_first() -> None:
    """Of equally used keys those leave whose bytes save least."""
    policy = CostAware[int]()
    for key, worth in enumerate((3.0, 1.0, 4.0, 1.5)):
        policy.insert(key, 1, worth=worth)
    assert policy.victims(4, nobody) == [1, 3, 0, 2]


def test_cost_aware_counts_the_use_that_says_most() -> None:
    """Many uses that would have recomputed a key do not make up for one that would have loaded it,
    nor take that away; what no use would ever have loaded leaves first."""
    policy = CostAware[int]()
    policy.insert(1, 1, worth=1.5, uses=0.1)
    policy.insert(2, 1, worth=1.0)
    policy.insert(3, 1, worth=1.1, uses=0.1)
    for _ in range(5):
        policy.touch(1, 0.1)
        policy.touch(2, 0.1)
    policy.touch(3)
    assert policy.victims(3, nobody) == [1, 2, 3]


def test_cost_aware_gives_a_growing_prefix_up_from_its_front() -> None:
    """What compute and loads meet behind moves on as a conversation grows: the front, which was
    used most often, leaves first and no hole opens behind it."""
    policy = CostAware[int]()
    for turn in range(1, 6):
        chunks, met = 4 * turn, 2 * turn
        for chunk in range(chunks):
            if chunk < chunks - 4:
                policy.touch(chunk, 0.01 if chunk < met else 1.0)
            else:
                policy.insert(chunk, 1, uses=0.01 if chunk < met else 1.0)
        policy.insert(1000 + turn, 1)
        assert policy.victims(1, lambda key: key < 1000) == [1000 + turn]  # time goes by
    assert policy.victims(20, nobody) == list(range(20))


@pytest.mark.parametrize("name", NAMES)
def test_what_would_leave_at_once_is_not_let_in(name: EvictionName) -> None:
    """By worth and chance where a policy knows of them; what is turned away again and again makes
    what is there grow old all the same. Other policies let everything in."""
    policy = load_eviction(name, int)
    fill(policy, *range(10))
    policy.victims(1, nobody)
    assert policy.admits(1, worth=1.0)
    assert policy.admits(1, worth=0.5) is (name != "cost-aware")
    assert policy.admits(1, uses=0.01) is (name != "cost-aware")
    assert any(policy.admits(1, worth=0.5) for _ in range(20))


def test_cost_aware_forgets() -> None:
    """What was used often, long ago, leaves before what is used now and then: evidence fades as
    the contents are replaced."""
    policy = CostAware[int]()
    policy.insert(0, 1)
    for _ in range(20):
        policy.touch(0)
    for key in range(1, 2000):
        policy.insert(key, 1)
        if len(policy) > 100:
            policy.victims(1, lambda other: other == 0)
    assert policy.victims(1, nobody) == [0]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 8), st.floats(0.1, 10.0), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_cost_aware_orders_as_its_formula_does(
    steps: list[tuple[int, int, float, bool]],
) -> None:
    """The heaps give the order of (worth) x (the use that says most, each a quarter a turnover),
    and while it is calm without the worth, worked out anew."""
    policy = CostAware[int]()
    there: dict[int, tuple[int, float, list[tuple[float, float]]]] = {}
    age, is_tight = 0.0, True

    def score(key: int) -> float:
        _, worth, uses = there[key]
        most = max(weight * float(0.25 ** (age - then)) for weight, then in uses)
        return worth * most if is_tight else most

    def evict(nbytes: int) -> float:
        nonlocal is_tight
        is_tight, held = policy.is_tight, sum(size for size, _, _ in there.values())
        left = policy.victims(nbytes, nobody)
        for key in left:
            assert score(key) <= min(map(score, there)) * (1 + 1e-9)
            nbytes -= there.pop(key)[0]
        return (held - sum(size for size, _, _ in there.values())) / held if held else 0.0

    for key, nbytes, worth, is_eviction in steps:
        if is_eviction:
            age += evict(nbytes)
        elif key in there:
            policy.touch(key, weight=0.5, worth=worth)
            there[key] = (there[key][0], worth, [*there[key][2], (0.5, age)])
        else:
            policy.insert(key, nbytes, worth=worth)
            there[key] = (nbytes, worth, [(1.0, age)])
    evict(1 << 30)


def calm() -> CostAware[int]:
    """An empty policy that has seen that nothing which left was wanted again."""
    policy = CostAware[int]()
    for key in range(100, 120):
        policy.insert(key, 1)
    policy.victims(1, nobody)
    for key in range(100, 120):
        policy.touch(key)
    assert not policy.is_tight
    policy.victims(20, nobody)
    assert not len(policy)
    return policy


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0.1, 10.0), st.floats(1.0, 5.0), st.booleans()),
        max_size=80,
    )
)
def test_cost_aware_is_recency_while_it_is_calm(
    steps: list[tuple[int, float, float, bool]],
) -> None:
    """Where nothing that left is wanted again, what was not used for longest leaves first, whatever
    it is worth and however often it was used before, if its uses would have loaded it."""
    aware, lru = calm(), Lru[int]()
    there: list[int] = []
    for number, (place, worth, weight, is_eviction) in enumerate(steps):
        if is_eviction:
            left = aware.victims(2, nobody)
            assert left == lru.victims(2, nobody)
            there = [key for key in there if key not in left]
        elif place < len(there):
            aware.touch(there[place], weight, worth)
            lru.touch(there[place])
        else:  # a new name each time: what comes back would be pressure
            aware.insert(number, 1, worth, weight)
            lru.insert(number, 1)
            there.append(number)


@pytest.mark.parametrize(("period", "is_tight"), [(20, True), (400, False)])
def test_cost_aware_finds_out_whether_worth_matters(period: int, is_tight: bool) -> None:
    """Room for ten: if what had to go comes round again, worth counts; if what leaves is never
    wanted again, it does not."""
    policy, there = CostAware[int](), set[int]()
    for step in range(400):
        if len(there) == 10:
            there.difference_update(policy.victims(1, nobody))
        if step % period not in there:
            policy.insert(step % period, 1)
            there.add(step % period)
        policy.touch(step % period)
    assert policy.is_tight is is_tight


def test_cost_aware_heeds_hints_while_it_is_calm() -> None:
    """A boost counts where worth does not: what shall stay stays longer, what may go goes."""
    policy = calm()
    for key in range(4):
        policy.insert(key, 1, worth=float(4 - key))
    policy.touch(0, 0.0, boost=8.0)
    policy.touch(3, 0.0, boost=0.1)
    assert policy.victims(4, nobody) == [3, 1, 2, 0]

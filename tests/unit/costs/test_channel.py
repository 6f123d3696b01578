"""The channel model: latency, bandwidth and depth, learned from how loads really ended."""

from __future__ import annotations

import random
from math import inf, isfinite
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import ChannelModel, ChannelProfile
from tests.unit.costs.links import Parallel, Serial, drive

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1_000_000
LINKS = st.tuples(st.floats(1e6, 1e10), st.floats(1e-5, 2e-2))


def sizes(chance: random.Random, typical: float = MB) -> Callable[[], int]:
    return lambda: max(1, int(typical * chance.choice((0.25, 0.5, 1.0, 2.0))))


def wobble(chance: random.Random, noise: float) -> Callable[[], float]:
    return lambda: chance.lognormvariate(0.0, noise)


def bandwidth(model: ChannelModel) -> float:
    found = model.bandwidth
    assert found is not None
    return found


def warm(latency: float = 5e-3) -> tuple[ChannelModel, float]:
    """100 MB/s, used at depth 3 until now."""
    model = ChannelModel()
    now = 0.0
    for _ in range(6):
        now = 1 + drive(model, Serial(1e8, latency), 12, depth=3, size=lambda: MB, now=now)
    return model, now


def test_nothing_is_known_before_the_first_load() -> None:
    """None and a depth of one; a channel that has never answered is as slow as it was silent."""
    model = ChannelModel()
    assert model.bandwidth is None
    assert model.profile() is None
    assert model.depth == 1
    assert model.left(5, 1.0) is None
    assert model.slower_than(1.0, 5, 1.0) == inf
    model.started(1, 100, 10.0)
    assert model.left(100, 12.0) == 2.0
    assert model.slower_than(3.0, 100, 12.0) == 13.0


def test_one_load_is_repeated_exactly() -> None:
    """After one load the same again is expected to take as long, and no latency is made up."""
    model = ChannelModel()
    model.started(1, 4096, 5.0)
    model.ended(1, 5.5, delivered=True)
    assert model.latency == pytest.approx(0.0, abs=1e-9)
    assert model.left(4096, 9.0) == pytest.approx(0.5)


@given(
    link=LINKS, depth=st.integers(2, 8), noise=st.sampled_from([0, 0.1]), seed=st.integers(0, 99)
)
def test_latency_and_bandwidth_are_told_apart(
    link: tuple[float, float], depth: int, noise: float, seed: int
) -> None:
    """Loads of several sizes, alone and behind others: both are found, and what comes next."""
    speed, latency = link
    chance, model, now = random.Random(seed), ChannelModel(), 0.0
    typical = max(speed * 4e-3, 16)
    channel = Serial(speed, latency, wobble(chance, noise))
    for number in range(24):
        deep = depth if number % 2 else 1
        loads = 20 if number % 2 else 1
        now = 1 + drive(model, channel, loads, depth=deep, size=sizes(chance, typical), now=now)
    if latency < 0.8 * (depth - 1) * typical / speed:  # else the link was never kept busy
        size = int(typical)
        alone = latency + size / speed
        assert model.left(size, now) == pytest.approx(alone, rel=0.05 + 2.5 * noise)
        assert bandwidth(model) == pytest.approx(speed, rel=0.05 + 2 * noise)
    else:
        assert bandwidth(model) < speed * (1.05 + 2 * noise)


@given(
    link=LINKS,
    wanted=st.sampled_from([(0.0, 0.85), (0.1, 0.8), (0.3, 0.6)]),
    seed=st.integers(0, 99),
)
def test_the_suggested_depth_keeps_the_link_busy(
    link: tuple[float, float], wanted: tuple[float, float], seed: int
) -> None:
    """Following the suggestion from the first load on, the link is soon used to 85 % and more, less
    where single loads wobble by 30 %."""
    (speed, latency), (noise, share) = link, wanted
    chance, model, now = random.Random(seed), ChannelModel(), 0.0
    size = int(max(speed * 4e-3, 16))
    channel = Serial(speed, latency, wobble(chance, noise))
    for _ in range(10):
        now = drive(model, channel, 20, depth=max(model.depth, 2), size=lambda: size, now=now)
    begun = now
    loads = 200
    now = drive(model, channel, loads, depth=max(model.depth, 2), size=lambda: size, now=now)
    assert loads * size / speed / (now - begun) > share


@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize("streams", [2, 4])
def test_loads_may_end_in_any_order(streams: int, depth: int) -> None:
    """Parallel streams finish large and small loads out of order: what a long queue of loads takes
    is still predicted within a factor of 1.5, and every count returns to zero."""
    chance, model, now = random.Random(streams * depth), ChannelModel(), 0.0
    channel = Parallel(streams, 1e8, 1e-3, wobble(chance, 0.2))
    for _ in range(8):
        now = 1 + drive(model, channel, 60, depth=depth, size=sizes(chance), now=now)
    begun = now
    asked = [sizes(chance)() for _ in range(100)]
    order = iter(asked)
    expected = model.left(sum(asked), now) or 0.0
    took = drive(model, channel, len(asked), depth=depth, size=lambda: next(order), now=now) - begun
    assert took / 1.5 < expected < took * 1.5
    assert model.in_flight == model.in_flight_bytes == 0


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_lasting_change_of_speed_is_followed_within_a_second(factor: float) -> None:
    """The link is suddenly 10x slower or faster: after a second of being busy that is known."""
    model, now = warm()
    channel, begun = Serial(1e8 / factor, 5e-3 * factor), now
    while now - begun < 1.0:
        now = drive(model, channel, 3, depth=3, size=lambda: MB, now=now)
    assert bandwidth(model) == pytest.approx(1e8 / factor, rel=0.25)


def test_a_channel_that_became_slower_is_known_to_be_by_its_third_load() -> None:
    """Two loads in a row that took far longer than expected, both by themselves and by what the
    channel delivered, are enough, however many are in flight."""
    model, now = warm()
    drive(model, Serial(1e7, 5e-3), 3, depth=3, size=lambda: MB, now=now)
    assert bandwidth(model) < 0.2e8


def test_one_pause_is_no_new_speed() -> None:
    """A pause of ten loads makes all of them late that were in flight, and says nothing about those
    that come after it."""
    model, now = warm()
    turn = iter(range(10_000))
    slow = lambda: 11.0 if next(turn) == 6 else 1.0  # noqa: E731
    drive(model, Serial(1e8, 5e-3, slow), 12, depth=6, size=lambda: MB, now=now)
    assert bandwidth(model) > 0.6e8


def test_outliers_move_nothing_much() -> None:
    """Every fortieth load takes thirty times as long: the rest are still predicted within 40 %."""
    model, now = warm()
    turn = iter(range(10_000))
    slow = lambda: 30.0 if next(turn) % 40 == 5 else 1.0  # noqa: E731
    drive(model, Serial(1e8, 5e-3, slow), 300, depth=3, size=lambda: MB, now=now)
    assert 0.6e8 < bandwidth(model) < 1.2e8


def test_idle_time_is_not_the_links_fault() -> None:
    """Hours without a load change nothing."""
    model, now = warm()
    before = bandwidth(model)
    drive(model, Serial(1e8, 5e-3), 30, depth=3, size=lambda: MB, now=now + 7200)
    assert bandwidth(model) == pytest.approx(before, rel=0.05)


def test_a_long_pipeline_does_not_forget_the_latency() -> None:
    """Two thousand loads whose latency is hidden leave what is known of it where it was."""
    model, now = warm()
    drive(model, Serial(1e8, 5e-3), 2000, depth=4, size=lambda: MB, now=now)
    assert model.latency == pytest.approx(5e-3, rel=0.3)


def test_failed_loads_make_the_channel_look_slower() -> None:
    """Half of the loads take their time and deliver nothing: the others pay for it."""
    model, now = warm()
    chance = random.Random(4)
    fails = lambda: chance.random() < 0.5  # noqa: E731
    drive(model, Serial(1e8, 5e-3), 200, depth=3, size=lambda: MB, now=now, delivered=fails)
    assert 0.3e8 < bandwidth(model) < 0.75e8


def test_a_channel_that_only_fails_is_never_known() -> None:
    """Nothing delivered, nothing learned."""
    model = ChannelModel()
    drive(model, Serial(1e8), 20, depth=2, size=lambda: MB, delivered=lambda: False)
    assert model.bandwidth is None
    assert model.in_flight == 0


def test_a_late_head_makes_the_channel_slower_every_moment() -> None:
    """An overdue load is expected to take as long again as it is late, and the timer agrees."""
    model, now = warm()
    alone = model.left(MB, now) or 0.0
    model.started(10**6, MB, now)
    assert model.left(MB, now) == pytest.approx(alone)
    assert model.left(MB, now + alone / 2) == pytest.approx(alone / 2)
    late = [model.left(MB, now + alone + wait) or 0.0 for wait in (0.1, 0.2, 1.0, 10.0)]
    assert late == sorted(late)
    assert late[-1] > 10
    at = model.slower_than(0.5, MB, now)
    assert model.left(MB, at + 1e-6) == pytest.approx(0.5, abs=1e-3)
    assert (model.left(MB, at - 1e-3) or 0.0) < 0.5


def test_bytes_not_yet_asked_for_take_a_latency() -> None:
    """A load asked for behind others arrives no sooner than its own latency."""
    model, now = warm(latency=0.05)
    model.started(10**6, 1000, now)
    assert (model.left(2000, now + 0.04) or 0.0) >= model.latency


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_a_loaded_profile_gives_way_within_ten_loads(wrong: float) -> None:
    """A profile of a link 10x slower or faster is a start, no more."""
    model = ChannelModel()
    model.prime(ChannelProfile(latency=5e-3 * wrong, per_byte=wrong / 1e8, unit=float(MB)))
    assert model.left(MB, 0.0) == pytest.approx(15e-3 * wrong)
    drive(model, Serial(1e8, 5e-3), 10, depth=3, size=lambda: MB)
    assert bandwidth(model) == pytest.approx(1e8, rel=0.2)


def test_a_profile_is_what_the_model_knows() -> None:
    """What one process learned is what the next begins with."""
    model, now = warm()
    profile = model.profile()
    assert profile is not None
    heir = ChannelModel()
    heir.prime(profile)
    for nbytes in (1, 1000, MB, 100 * MB):
        assert heir.left(nbytes, now) == pytest.approx(model.left(nbytes, now))


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["start", "end", "fail"]),
            st.integers(1, 1 << 40),
            st.floats(0, 1e4),
            st.integers(0, 1 << 20),
        ),
        max_size=60,
    )
)
def test_predictions_stay_sane_whatever_happens(
    steps: list[tuple[str, int, float, int]],
) -> None:
    """Loads of any size ending at any time in any order: finite, never negative, more for more
    bytes, and the counts are right."""
    model, flying, now = ChannelModel(), dict[int, int](), 0.0
    for number, (what, nbytes, wait, pick) in enumerate(steps):
        now += wait
        if what == "start":
            model.started(number, nbytes, now)
            flying[number] = nbytes
        elif flying:
            load = sorted(flying)[pick % len(flying)]
            del flying[load]
            model.ended(load, now, delivered=what == "end")
            model.ended(load, now, delivered=True)  # again: ignored
        assert model.in_flight == len(flying)
        assert model.in_flight_bytes == sum(flying.values())
        assert 1 <= model.depth <= 64
        assert model.latency >= 0.0
        if model.bandwidth is not None:
            assert isfinite(model.bandwidth)
            assert model.bandwidth > 0
            asked = (0, 1, 1 << 10, 1 << 30, model.in_flight_bytes + 1, 1 << 50)
            times = [model.left(n, now + wait) or 0.0 for n in sorted(asked)]
            assert all(isfinite(t) and t >= 0 for t in times)
            assert times == sorted(times)
            assert model.slower_than(1.0, 1 << 20, now) >= now


def test_outcomes_are_held_against_predictions() -> None:
    """Each load that was predicted gives a ratio of outcome to prediction, handed out once."""
    model, now = warm()
    assert all(ratio == pytest.approx(1.0, rel=0.3) for ratio in model.take_checks()[20:])
    alone = model.left(MB, now) or 0.0
    model.started(10**6, MB, now)
    model.ended(10**6, now + 2 * alone, delivered=True)
    assert model.take_checks() == [pytest.approx(2.0)]
    assert model.take_checks() == []


@given(seed=st.integers(0, 1 << 32))
def test_what_is_said_of_all_loads_at_once_is_what_is_said_of_each(seed: int) -> None:
    """Loads that start, end in any order, fail and are passed by others, at any moment: each that
    is asked about lands when the bytes up to it do, or when it stops hanging, and no other does."""
    chance = random.Random(seed)
    flying: list[int] = []
    model, now, number = ChannelModel(), 0.0, 0
    for _ in range(60):
        now += chance.expovariate(1.0) * chance.choice((1e-4, 1e-2, 1.0))
        if flying and chance.random() < 0.5:
            load_id = flying.pop(chance.randrange(len(flying)))
            model.ended(load_id, now, delivered=chance.random() < 0.8)
        else:
            number += 1
            flying.append(number)
            model.started(number, chance.randrange(1, 10 * MB), now)
        wanted = {load_id for load_id in flying if chance.random() < 0.7}
        later = now + chance.expovariate(1.0)
        each = {
            load_id: max(model.left(model.ahead(load_id), later) or 0.0, model.lag(load_id, later))
            for load_id in wanted
        }
        assert dict(model.landings(wanted, later)) == each

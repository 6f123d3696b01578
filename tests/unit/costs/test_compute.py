"""The compute model: three rates learned from layers, whatever the machine does meanwhile."""

from __future__ import annotations

import random
from math import inf, isfinite, nan
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import ComputeModel, ComputeProfile
from cacheflow.types import Tile, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LINEAR, ATTENTION = 7e6, 2304.0
LAYERS = 30
TILES = TileGrid().split(0, 16384)
Rates = tuple[float, float, float]
RATES = st.tuples(st.floats(0, 5e-3), st.floats(0.5e-12, 2e-12), st.floats(1e-12, 5e-12))


def tile(start: int, width: int) -> Tile:
    return Tile(0, start, start + width)


def truth(rates: Rates) -> Callable[[Tile], float]:
    def seconds(tile: Tile) -> float:
        a = LINEAR * tile.width
        b = ATTENTION * tile.width * (tile.start + tile.width / 2)
        return rates[0] + rates[1] * a + rates[2] * b

    return seconds


MACHINE = truth((0.5e-3, 1e-12, 3e-12))
"""A launch is 12 % of the first tile; attention runs at a third of the linear speed."""


def learn(
    model: ComputeModel,
    seconds: Callable[[Tile], float],
    tiles: Iterable[Tile] = TILES,
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> None:
    chance = random.Random(seed)
    for each in tiles:
        for _ in range(LAYERS):
            model.observe(each, seconds(each) * chance.lognormvariate(0.0, noise))


def error(model: ComputeModel, seconds: Callable[[Tile], float], each: Tile) -> float:
    found = model.layer_seconds(each)
    assert found is not None
    return abs(found / seconds(each) - 1)


def known() -> ComputeModel:
    model = ComputeModel(LINEAR, ATTENTION)
    learn(model, MACHINE, noise=0.03)
    return model


def test_nothing_is_known_before_the_first_layer() -> None:
    """Predictions, rates and profile are None; what is no time teaches nothing."""
    model = ComputeModel(LINEAR, ATTENTION)
    for seconds in (0.0, -1.0, nan, inf):
        model.observe(TILES[0], seconds)
    model.observe(tile(5, 0), 1.0)
    assert not model.known
    assert model.layer_seconds(TILES[0]) is None
    assert model.rates is None
    assert model.profile() is None


def test_one_layer_is_repeated_exactly() -> None:
    """After one observation its own prediction is what was seen, and no launch is made up."""
    model = ComputeModel(LINEAR, ATTENTION)
    model.observe(TILES[1], 0.25)
    assert model.layer_seconds(TILES[1]) == pytest.approx(0.25, rel=1e-12)
    assert model.rates is not None
    assert model.rates[0] == pytest.approx(0.0, abs=1e-12)
    assert model.rates[1] == pytest.approx(model.rates[2], rel=1e-9)


def test_work_that_costs_nothing_is_refused() -> None:
    """A layer without linear work cannot be: every cost divides by it."""
    with pytest.raises(ValueError, match="linear 0"):
        ComputeModel(0.0, 1.0)
    with pytest.raises(ValueError, match="attention -1"):
        ComputeModel(1.0, -1.0)


def test_the_rates_add_up_to_any_set_of_cells() -> None:
    """``k0 * n + k1 * A + k2 * B`` over the work of tiles is the sum of their predictions."""
    model = known()
    assert model.rates is not None
    work = [model.work(each) for each in TILES]
    linear, attention = (sum(part) for part in zip(*work, strict=True))
    k0, k1, k2 = model.rates
    total = k0 * len(TILES) + k1 * linear + k2 * attention
    assert total == pytest.approx(sum(model.layer_seconds(each) or 0.0 for each in TILES))


@given(rates=RATES, seed=st.integers(0, 1000))
def test_it_finds_the_truth_under_noise(rates: Rates, seed: int) -> None:
    """Two prompts computed with 4 % noise: every tile is predicted within 10 %."""
    model, seconds = ComputeModel(LINEAR, ATTENTION), truth(rates)
    for again in range(2):
        learn(model, seconds, noise=0.04, seed=seed + again)
    learn(model, seconds, TILES[:4], noise=0.04, seed=seed)
    assert all(error(model, seconds, each) < 0.10 for each in TILES)


def test_a_launch_makes_narrow_tiles_dear() -> None:
    """Once narrow and wide tiles were seen, one of another width is predicted with its launch."""
    model, seconds = ComputeModel(LINEAR, ATTENTION), truth((2e-3, 1e-12, 3e-12))
    narrow = [tile(4096, width) for width in (16, 64, 256)]
    for seed in range(3):
        learn(model, seconds, [*TILES[:5], *narrow], noise=0.03, seed=seed)
    assert model.rates is not None
    assert model.rates[0] == pytest.approx(2e-3, rel=0.1)
    assert error(model, seconds, tile(2048, 128)) < 0.1


def test_one_width_alone_is_safe() -> None:
    """With one tile seen a thousand times, others are predicted at half to twice the truth."""
    model = ComputeModel(LINEAR, ATTENTION)
    learn(model, MACHINE, [TILES[0]] * 33, noise=0.05)
    assert error(model, MACHINE, TILES[0]) < 0.05
    for each in TILES[:5]:
        assert 0.5 < (model.layer_seconds(each) or 0.0) / MACHINE(each) < 2


def test_wide_tiles_are_not_forgotten_while_only_narrow_ones_are_seen() -> None:
    """Three thousand layers of the first tile leave what is known of the last one where it was."""
    model = known()
    learn(model, MACHINE, [TILES[0]] * 100, noise=0.03)
    assert all(error(model, MACHINE, each) < 0.12 for each in TILES)


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("seen", [TILES[0], TILES[5]])
def test_a_lasting_change_of_speed_is_followed_within_ten_layers(factor: float, seen: Tile) -> None:
    """Everything is suddenly 10x slower or faster: ten layers later all tiles are predicted so,
    though one alone was seen."""
    model = known()
    chance = random.Random(1)
    for _ in range(10):
        model.observe(seen, factor * MACHINE(seen) * chance.lognormvariate(0.0, 0.05))
    slower = lambda each: factor * MACHINE(each)  # noqa: E731
    assert error(model, slower, seen) < 0.15
    assert all(error(model, slower, each) < 0.30 for each in TILES)


def test_outliers_move_nothing_much() -> None:
    """Every tenth layer takes fifty times as long (a page fault, a neighbour): within 25 %."""
    model = known()
    for number in range(400):
        each = TILES[number // 40]
        model.observe(each, MACHINE(each) * (50 if number % 10 == 3 else 1))
    assert all(error(model, MACHINE, each) < 0.25 for each in TILES)


def test_a_slow_first_layer_is_forgotten() -> None:
    """The first layer of a process often takes ten times as long: ten layers later it is past."""
    model = ComputeModel(LINEAR, ATTENTION)
    model.observe(TILES[0], 10 * MACHINE(TILES[0]))
    for _ in range(10):
        model.observe(TILES[0], MACHINE(TILES[0]))
    assert error(model, MACHINE, TILES[0]) < 0.15


def test_contention_comes_and_goes() -> None:
    """A neighbour takes half the machine for a while, again and again: always followed."""
    model = known()
    for number in range(12):
        share = 2.0 if number % 2 else 1.0
        for _ in range(20):
            model.observe(TILES[2], share * MACHINE(TILES[2]))
        assert error(model, lambda each, s=share: s * MACHINE(each), TILES[2]) < 0.1  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_a_loaded_profile_gives_way_within_ten_layers(wrong: float) -> None:
    """A profile of a machine 10x slower or faster is a start, no more."""
    profile = ComputeProfile(wrong * 0.5e-3, wrong * 1e-12, wrong * 3e-12, wrong * 4e-3)
    model = ComputeModel(LINEAR, ATTENTION)
    model.prime(profile)
    assert model.known
    assert error(model, lambda each: wrong * MACHINE(each), TILES[3]) < 1e-9
    chance = random.Random(2)
    for _ in range(10):
        model.observe(TILES[1], MACHINE(TILES[1]) * chance.lognormvariate(0.0, 0.05))
    assert error(model, MACHINE, TILES[1]) < 0.1
    assert all(error(model, MACHINE, each) < 0.25 for each in TILES)


def test_a_profile_is_what_the_model_knows() -> None:
    """What one process learned is what the next begins with."""
    model, heir = known(), ComputeModel(LINEAR, ATTENTION)
    profile = model.profile()
    assert profile is not None
    heir.prime(profile)
    for each in TILES:
        assert heir.layer_seconds(each) == pytest.approx(model.layer_seconds(each))


@given(
    observed=st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(1, 8192), st.floats(1e-9, 1e6)),
        min_size=1,
        max_size=60,
    )
)
def test_predictions_stay_sane_whatever_is_observed(
    observed: list[tuple[int, int, float]],
) -> None:
    """Times that make no sense at all: finite, positive, and more for more tokens or later ones."""
    model = ComputeModel(LINEAR, ATTENTION)
    for start, width, seconds in observed:
        model.observe(tile(start, width), seconds)
        for at in (0, 1000, 100_000):
            costs = [model.layer_seconds(tile(at, w)) or 0.0 for w in (1, 16, 512, 2048, 8192)]
            assert all(isfinite(cost) and cost > 0 for cost in costs)
            assert costs == sorted(costs)
            later = model.layer_seconds(tile(at + 5000, 512)) or 0.0
            assert later >= costs[2]
    assert 0.0 <= model.lateness <= 1.0


def test_lateness_is_how_much_longer_layers_take() -> None:
    """It grows where layers wobble, and shrinks where they keep to what was predicted."""
    model = known()
    calm = model.lateness
    chance = random.Random(3)
    for _ in range(200):
        model.observe(TILES[0], MACHINE(TILES[0]) * chance.lognormvariate(0.0, 0.5))
    assert model.lateness > calm + 0.05
    for _ in range(300):
        model.observe(TILES[0], model.layer_seconds(TILES[0]) or 0.0)
    assert model.lateness < 0.02


def test_outcomes_are_held_against_predictions() -> None:
    """Each layer after the first gives a ratio of outcome to prediction, handed out once."""
    model = ComputeModel(LINEAR, ATTENTION)
    for seconds in (1.0, 1.0, 1.5):
        model.observe(TILES[0], seconds)
    assert model.take_checks() == [pytest.approx(1.0), pytest.approx(1.5)]
    assert model.take_checks() == []

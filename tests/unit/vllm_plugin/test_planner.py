"""How far compute goes in a step: neither slower than loading alone nor than computing alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cacheflow.costs import ComputeModel
from cacheflow.plugins.vllm.planner import (
    WAIT,
    WHOLE,
    View,
    choose,
    hideable,
    may_begin,
    tail,
)
from cacheflow.types import Tile

BLOCK = 128
LAUNCH, TOKEN = 0.02, 0.0005
"""Seconds a step, and a token: a block takes 64 ms in a long step."""


@pytest.fixture
def costs() -> ComputeModel:
    model = ComputeModel(1e6, 1e-6)
    for width in (64, 128, 256, 512, 1024, 2048, 4096) * 6:
        model.observe(Tile(0, 0, width), LAUNCH + TOKEN * width)
    return model


def view(block_seconds: float | None, **other: object) -> View:
    base = View(
        done=0,
        tokens=32 * BLOCK + 40,
        block=BLOCK,
        top=32,
        low=32,
        bottom=0,
        block_seconds=block_seconds,
        first_seconds=0.0,
        waited=0.0,
        budget=8192,
    )
    return replace(base, **other)  # type: ignore[arg-type]


def play(block_seconds: float, costs: ComputeModel, slower: float = 1.0) -> float:
    """Seconds of a whole restore, step by step, with loads as predicted and compute ``slower``."""
    now, state = 0.0, view(block_seconds)
    while state.done < state.top * BLOCK:
        low = max(32 - math.floor(now / block_seconds + 1e-9), state.edge)
        state = replace(state, low=low, waited=now % block_seconds)
        if not state.gap:
            state = replace(state, done=state.top * BLOCK)
            break
        blocks = choose(state, costs)
        if blocks == WAIT:
            now = (math.floor(now / block_seconds + 1e-9) + 1) * block_seconds
            continue
        stop = state.tokens if blocks == WHOLE else (state.edge + blocks) * BLOCK
        now += slower * (LAUNCH + TOKEN * (stop - state.done))
        state = replace(state, done=stop)
    if state.done < state.tokens:
        now += slower * (LAUNCH + TOKEN * (state.tokens - state.done))
    return now


@pytest.mark.parametrize(
    "block_seconds", [0.0005, 0.005, 0.02, 0.04, 0.064, 0.1, 0.2, 0.4, 1.0, 10.0]
)
def test_never_worse_than_the_better_one(costs: ComputeModel, block_seconds: float) -> None:
    """At every speed a restore takes no longer than the better single way, plus 3 %."""
    tokens = 32 * BLOCK + 40
    alone = LAUNCH + TOKEN * tokens
    loaded = 32 * block_seconds + LAUNCH + TOKEN * 40
    assert play(block_seconds, costs) <= 1.03 * min(alone, loaded) + 1e-6


def test_at_balance_each_does_half(costs: ComputeModel) -> None:
    """Where both take the same time, together they take little more than half of it."""
    alone = LAUNCH + TOKEN * (32 * BLOCK + 40)
    assert play(alone / 32, costs) <= 0.6 * alone


@pytest.mark.parametrize("slower", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("block_seconds", [0.02, 0.03, 0.04])
def test_a_race_is_looked_at_halfway(
    costs: ComputeModel, block_seconds: float, slower: float
) -> None:
    """Compute that is slower than it was costs no race its sense: a step that cannot be taken back
    is not all that compute was to do. In one step it took up to 1.4 times what loads alone do."""
    loaded = 32 * block_seconds + slower * (LAUNCH + TOKEN * 40)
    assert play(block_seconds, costs, slower) <= 1.05 * loaded


def test_fast_loads_are_waited_for(costs: ComputeModel) -> None:
    """A store that is much faster gets no competition."""
    assert choose(view(0.001), costs) == WAIT


def test_slow_loads_are_not(costs: ComputeModel) -> None:
    """A store that would not deliver one block in time does not shorten a step."""
    assert choose(view(30.0), costs) == WHOLE


def test_a_late_load_is_given_up(costs: ComputeModel) -> None:
    """A store that was fast and is silent is not waited for any longer."""
    assert choose(view(0.001, waited=0.0005), costs) == WAIT
    assert choose(view(0.001, waited=0.05), costs) != WAIT


def test_what_is_not_stored_is_computed_first(costs: ComputeModel) -> None:
    """Blocks below the lowest stored one leave nothing to wait for."""
    assert choose(view(0.001, bottom=10), costs) == 10


def test_dead_restores_are_computed_up_to_what_is_there(costs: ComputeModel) -> None:
    """After a failure compute takes exactly the blocks that did not come."""
    assert choose(view(0.001, low=20, bottom=20), costs) == 20
    assert choose(view(0.001, bottom=32), costs) == WHOLE


def test_cold_costs_are_found_out() -> None:
    """With nothing known the first load gets a moment, then compute takes a few blocks."""
    cold = ComputeModel(1e6, 1e-6)
    assert choose(view(None), cold) == WAIT
    assert choose(view(None, waited=0.02), cold) == 4


# -- a pass that begins under its last loads ------------------------------------------------------

SUFFIX = 512
PASS = LAUNCH + TOKEN * SUFFIX
"""Seconds to compute what is behind the prefix: 276 ms."""


def under(block_seconds: float | None, **other: object) -> View:
    return view(block_seconds, tokens=32 * BLOCK + SUFFIX, hidden=0.8, **other)


def test_as_much_is_hidden_as_the_pass_allows(costs: ComputeModel) -> None:
    """A share of the first pass behind the prefix, whatever comes after it."""
    assert hideable(under(0.02), costs) == pytest.approx(0.8 * PASS, rel=0.02)
    long = under(0.02, budget=256)
    assert hideable(long, costs) == pytest.approx(0.8 * (LAUNCH + TOKEN * 256), rel=0.02)
    assert hideable(view(0.02), costs) == 0.0


def test_so_many_blocks_come_by_layers_as_the_pass_hides(costs: ComputeModel) -> None:
    """At least one; none where reads of single layers would cost more than they hide."""
    assert tail(under(0.02), costs) == math.ceil(PASS / 0.02)
    assert tail(under(5.0), costs) == 1
    assert tail(under(0.004), costs) == 0, "reads of single layers would cost more"
    assert tail(under(None), costs) == 0
    assert tail(under(0.02), ComputeModel(1e6, 1e-6)) == 0


def test_a_pass_begins_when_the_rest_comes_in_time(costs: ComputeModel) -> None:
    """Not before, not while a load is late, and not over what is not stored."""
    assert may_begin(under(0.02, low=10), costs)
    assert not may_begin(under(0.02, low=12), costs)
    assert may_begin(under(0.02, low=12, part=2.0), costs)
    assert not may_begin(under(0.02, low=10, waited=1.0), costs)
    assert not may_begin(under(0.02, low=10, bottom=1), costs)
    assert not may_begin(under(0.02, low=10, done=5), costs)
    assert not may_begin(view(0.02, low=1), costs)


def test_compute_takes_less_when_loads_go_on_under_the_pass(costs: ComputeModel) -> None:
    """The ends meet where loads have only as much left as the pass hides."""
    alone = PASS + LAUNCH + TOKEN * 32 * BLOCK
    with_pass, without = (
        choose(view(alone / 32, tokens=32 * BLOCK + SUFFIX, hidden=hidden), costs)
        for hidden in (0.8, 0.0)
    )
    assert 0 < with_pass < without


@pytest.mark.parametrize("seconds", [0.3, 0.1])
def test_a_block_that_comes_whole_hides_nothing(seconds: float) -> None:
    """Compute does not leave the last blocks to loads under a long pass that cannot begin before
    them: with 8 blocks and 2,048 tokens behind them that took up to 40 % longer than computing
    all. As they come by layers, they are left to them."""
    model = ComputeModel(1e6, 1e-6)
    token = seconds / 2048
    for width in (64, 128, 256, 512, 1024, 2048) * 6:
        model.observe(Tile(0, 0, width), 0.003 + token * width)
    long = view(seconds, tokens=8 * BLOCK + 2048, top=8, low=8, budget=2048, hidden=0.8)
    assert choose(replace(long, whole=2), model) == WHOLE
    assert 0 < choose(long, model) < 8


def test_loads_alone_are_waited_for_until_the_pass_hides_the_rest(costs: ComputeModel) -> None:
    """A store that is slower than compute by what the pass hides is as fast as both together."""
    seconds = (LAUNCH + TOKEN * BLOCK) * 1.5
    assert choose(view(seconds, low=2, tokens=32 * BLOCK + SUFFIX), costs) != WAIT
    assert choose(under(seconds, low=2), costs) == WAIT

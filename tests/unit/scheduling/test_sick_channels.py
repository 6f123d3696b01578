"""A channel that hangs, or becomes ten times slower, in virtual time: what a request loses."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

import pytest
from sick_virtual import CHUNK, STRIDE, Rig, hung, hung_ratio, slowed

from cacheflow.costs import ChannelModel
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.harness import OBJECTIVES, options, warm

if TYPE_CHECKING:
    from cacheflow.types import Load

pytestmark = pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways

FOUND_OUT_LATE: Final[dict[tuple[int, float], float]] = {(512, 10): 1.18, (1024, 10): 1.13}
"""Over the best from the change on: the first slow load alone is that much of the rest."""


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("compute_io", [0.33, 1, 3, 10, 30, 100])
@pytest.mark.parametrize("tokens", [512, 1024, 4096])
def test_a_channel_that_hangs_costs_a_twentieth_at_most(
    tokens: int, compute_io: float, share: float
) -> None:
    """From the start, or after a quarter or half of a healthy restore: the first token is there
    within 1.05 times recompute alone, also where loading is so fast that recompute is not begun at
    all (30:1): then loads are waited for by what is at stake, not only by what they should take."""
    assert hung_ratio(tokens, compute_io, share) <= 1.05


def test_loads_that_compute_has_overtaken_keep_nobody_waiting() -> None:
    """They hang, so the end of the restore is not planned around them: compute goes through all
    cells without a pause."""
    rig = Rig(512, 30)
    rig.link.outcome = hung
    rig.seconds(rig.run, "adaptive")
    assert rig.restored <= 1.05 * sum(seconds for seconds, _ in rig.cells())


@pytest.mark.parametrize("compute_io", [0.33, 1, 3, 10, 30, 100])
@pytest.mark.parametrize("tokens", [512, 1024, 4096])
def test_a_channel_that_becomes_ten_times_slower(tokens: int, compute_io: float) -> None:
    """After half of a healthy restore: within a tenth of the fluid bound of the real speeds, which
    knows the change beforehand; or, where what was kept for the suffix to hide and what is in
    flight by then are much of a restore, within a twentieth of the best from the change on."""
    seen = slowed(tokens, compute_io)
    limit = FOUND_OUT_LATE.get((tokens, compute_io), 1.05)
    assert seen.restored <= max(1.10 * seen.bound, limit * seen.from_change)


def test_what_is_very_late_is_expected_to_take_much_longer() -> None:
    """As long again as it is late at first; beyond four times what it should have taken, as many
    times longer; and the time at which that exceeds a limit is foretold."""
    model = ChannelModel()
    model.started(1, 1000, 0.0)
    model.ended(1, 1.0, delivered=True)
    model.started(2, 1000, 10.0)
    assert model.left(1000, 14.0) == pytest.approx(1 + 3)
    assert model.left(1000, 19.0) == pytest.approx(1 + 8 * 8 / 4)
    for seconds in (2.0, 4.9, 6.0, 50.0):
        when = model.slower_than(seconds, 1000, 10.0)
        assert model.left(1000, when) == pytest.approx(seconds)
    assert model.slower_than(inf, 1000, 10.0) == inf


def test_a_channel_is_silent_from_when_it_was_due_by_what_is_at_stake() -> None:
    """At least four times what its oldest load should have taken; never with nothing under way, or
    before anything is known."""
    model = ChannelModel()
    model.started(1, 1000, 0.0)
    assert model.silent_from(0.0) == inf
    model.ended(1, 1.0, delivered=True)
    assert model.silent_from(0.0) == inf
    model.started(2, 1000, 10.0)
    assert model.silent_from(0.0) == pytest.approx(11 + 4)
    assert model.silent_from(30.0) == pytest.approx(11 + 30)


def test_a_load_that_is_much_too_slow_puts_its_channel_in_doubt() -> None:
    """Until one is not; with the second in a row it has the speed of that one: the first may have
    begun at the old speed."""
    model = ChannelModel()
    for i in range(8):
        model.started(i, 1000, float(i))
        model.ended(i, i + 1.0, delivered=True)
    doubts = []
    for i, (begin, end) in enumerate([(8.0, 12.0), (12.0, 13.0)], start=8):
        model.started(i, 1000, begin)
        model.ended(i, end, delivered=True)
        doubts.append(model.is_in_doubt)
    assert doubts == [True, False]
    for i, (begin, end) in enumerate([(13.0, 17.0), (17.0, 27.0)], start=10):
        model.started(i, 1000, begin)
        model.ended(i, end, delivered=True)
    assert model.left(1000, 27.0) == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_load_that_hangs_while_others_pass_it_is_raced(objective: str) -> None:
    """One object never comes, though the channel delivers all else without a pause: its request
    does not wait for its deadline, and neither does anybody who comes later."""
    cell = 0.02
    hung: list[Load] = []
    link = Link(STRIDE / cell)
    grid = TileGrid((), CHUNK)
    run = VirtualRun(lambda tile: cell, {"link": link}, attention=0.0, **options(objective))
    warm(run, [grid.tile(i) for i in range(5)], lambda tile: cell, STRIDE)

    def outcome(load: Load) -> bool | None:
        if load.request_id != "hung" or hung:
            return True
        hung.append(load)
        run.at(run.clock.now() + 30.0, lambda: run.lose(load, late=True))
        return None

    link.outcome, start = outcome, run.clock.now()
    names = ["hung", *(f"r{i}" for i in range(60))]
    for i, name in enumerate(names):
        spec = make_spec(
            4 * CHUNK,
            5 * CHUNK,
            chunk=CHUNK,
            grid=grid,
            request_id=name,
            arrival=start + 0.2 * i,
        )
        run.arrive(spec, [Coverage("link", ((1 << spec.num_layers) - 1,) * 4, STRIDE)])
    run.run(*names)
    assert hung
    ends = [run.finished_at[name] - start - 0.2 * i for i, name in enumerate(names)]
    assert max(ends) < 3.0, max(ends)


def test_only_what_others_pass_lags_however_long_it_takes() -> None:
    """Late beyond four times what it should have taken, and passed by one that began after it: it
    is expected to take as long again, from a time that is foretold. What is first in line is not
    judged by itself, nor what is passed but may come any moment."""
    model = ChannelModel()
    model.started(1, 1000, 0.0)
    model.ended(1, 1.0, delivered=True)
    model.started(2, 1000, 10.0)
    model.started(3, 1000, 10.0)
    assert model.lag(2, 100.0) == 0.0
    assert model.lags_from(2, 1.0) == inf
    model.ended(3, 12.0, delivered=True)
    assert model.lag(2, 14.0) == 0.0
    for seconds in (5.0, 50.0):
        assert model.lag(2, model.lags_from(2, seconds)) == pytest.approx(seconds)
    model.started(4, 1000, 20.0)
    model.ended(4, 20.5, delivered=False)
    model.ended(2, 21.0, delivered=True)
    assert model.lag(2, 100.0) == 0.0


def test_one_load_that_hangs_while_others_pass_costs_its_own_cells() -> None:
    """A long prompt, a load of it that is given up after a while, and a link that delivers all
    others: the rest is restored from both ends as ever, instead of by recompute alone."""
    cell = 0.02
    hung: list[Load] = []
    link = Link(STRIDE / cell)
    grid = TileGrid((), CHUNK)
    run = VirtualRun(lambda tile: cell, {"link": link}, attention=0.0, **options("mean"))
    warm(run, [grid.tile(i) for i in range(5)], lambda tile: cell, STRIDE)

    def outcome(load: Load) -> bool | None:
        if hung or load.tile > 36:
            return True
        hung.append(load)
        run.at(run.clock.now() + 0.5, lambda: run.lose(load, late=True))
        return None

    link.outcome, start = outcome, run.clock.now()
    spec = make_spec(40 * CHUNK, 41 * CHUNK, chunk=CHUNK, grid=grid)
    run.admit(spec, [Coverage("link", ((1 << spec.num_layers) - 1,) * 40, STRIDE)])
    run.run(spec.id)
    assert hung
    cells, suffix = 40 * spec.num_layers * cell, spec.num_layers * cell
    hole = spec.num_layers * cell + 0.5
    assert run.finished_at[spec.id] - start <= cells / 2 + suffix + hole


@pytest.mark.parametrize("objective", ["mean", "tail"])
def test_what_nobody_has_is_not_the_first_because_there_is_nothing_to_load(objective: str) -> None:
    """A long prompt of which nothing is stored takes long, so a short one goes first."""
    cell = 0.02
    link, grid = Link(STRIDE / cell), TileGrid((), CHUNK)
    run = VirtualRun(lambda tile: cell, {"link": link}, attention=0.0, **options(objective))
    warm(run, [grid.tile(i) for i in range(5)], lambda tile: cell, STRIDE)
    start = run.clock.now()
    for name, chunks, stored in (("long", 40, 0), ("short", 4, 4)):
        spec = make_spec(
            chunks * CHUNK,
            (chunks + 1) * CHUNK,
            chunk=CHUNK,
            grid=grid,
            request_id=name,
            arrival=start,
        )
        full = (1 << spec.num_layers) - 1
        run.admit(spec, [Coverage("link", (full,) * stored, STRIDE)])
    alone = run.scheduler.expected_seconds("long")
    assert alone == pytest.approx(41 * spec.num_layers * cell, rel=0.02)
    run.run("long", "short")
    assert run.finished_at["short"] - start <= 0.2 * alone

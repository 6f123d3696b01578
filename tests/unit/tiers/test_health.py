"""The breaker as a state machine, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheflow.tiers.health import Ailment, Health, HealthLimits, State

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = HealthLimits(failures=3, first_wait=1.0, longest_wait=8.0)
SINGLE = [a for a in Ailment if a not in (Ailment.LATE, Ailment.OVERTAKEN)]


def sick(at: float = 0.0) -> Health:
    health = Health(LIMITS)
    assert health.failed(Ailment.LATE, at)
    return health


@pytest.mark.parametrize("ailment", SINGLE)
def test_failures_in_a_row_set_it_aside(ailment: Ailment) -> None:
    """As many as the limit says, not one fewer; only the last one says so."""
    health = Health(LIMITS)
    assert [health.failed(ailment, 0.0) for _ in range(3)] == [False, False, True]
    assert health.state is State.SICK
    assert health.counts[ailment] == 3


@pytest.mark.parametrize("ailment", [Ailment.LATE, Ailment.OVERTAKEN])
def test_one_that_hangs_sets_it_aside(ailment: Ailment) -> None:
    """Waiting in vain costs more than an error does: once is enough."""
    assert Health(LIMITS).failed(ailment, 0.0)


def test_a_third_of_failures_is_borne() -> None:
    """One failure among two successes goes on for ever, one to one does not."""
    health = Health(LIMITS)
    for _ in range(1000):
        assert not health.failed(Ailment.FAILED, 0.0)
        health.succeeded()
        health.succeeded()
    fell = False
    for _ in range(6):
        fell = fell or health.failed(Ailment.FAILED, 0.0)
        health.succeeded()
    assert fell


def test_it_is_probed_when_its_time_has_come_and_by_one_at_a_time() -> None:
    """Not before, and not twice; a probe that nobody saw end may be made again at once."""
    health = sick()
    assert not health.begin_probe(0.99)
    assert health.begin_probe(1.0)
    assert not health.begin_probe(5.0)
    health.probe_abandoned()
    assert health.begin_probe(5.0)
    health.probed(True, 5.0)
    assert health.well
    assert not health.begin_probe(100.0)


def test_the_waits_double_up_to_the_longest() -> None:
    """1, 2, 4, 8, 8 seconds between probes that fail."""
    health, now, waits = sick(), 0.0, []
    for _ in range(5):
        waits.append(health.retry_at - now)
        now = health.retry_at
        assert health.begin_probe(now)
        health.probed(False, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize(("well_for", "wait"), [(7.9, 2.0), (8.1, 1.0)])
def test_sick_again_soon_it_waits_longer(well_for: float, wait: float) -> None:
    """A tier that comes and goes is tried ever more seldom; one that was well for long is new."""
    health = sick()
    assert health.begin_probe(1.0)
    health.probed(True, 1.0)
    assert health.failed(Ailment.LATE, 1.0 + well_for)
    assert health.wait == wait


def test_being_well_again_forgives() -> None:
    """After a probe that went well it takes as many failures as ever."""
    health = sick()
    assert health.begin_probe(1.0)
    health.probed(True, 1.0)
    assert not health.failed(Ailment.FAILED, 2.0)
    assert not health.failed(Ailment.FAILED, 2.0)
    assert health.failed(Ailment.FAILED, 2.0)


def test_what_ends_late_does_not_count_twice() -> None:
    """Operations begun before it fell sick end somehow: counted, and nothing else."""
    health = sick()
    for end in (lambda: health.failed(Ailment.LATE, 0.5), health.succeeded):
        end()
    assert (health.state, health.retry_at) == (State.SICK, 1.0)
    assert health.counts[Ailment.LATE] == 2


@pytest.mark.parametrize("end", [lambda h: h.probed(True, 0.0), lambda h: h.probe_abandoned()])
def test_a_probe_that_was_not_begun_cannot_end(end: Callable[[Health], None]) -> None:
    """That is a mistake of the caller."""
    with pytest.raises(RuntimeError, match="no probe"):
        end(sick())


@given(st.lists(st.sampled_from([*SINGLE, None]), max_size=200))
def test_it_never_falls_sick_of_less_than_a_third(ends: list[Ailment | None]) -> None:
    """Whatever the order, as long as every failure is followed by two successes."""
    health = Health(LIMITS)
    for end in ends:
        if end is not None:
            assert not health.failed(end, 0.0)
            health.succeeded()
        health.succeeded()
    assert health.well


class Breaker(RuleBasedStateMachine):
    """Any sequence of ends, probes and waits, against the rules in plain words."""

    def __init__(self) -> None:
        super().__init__()
        self.health = Health(LIMITS)
        self.now = 0.0
        self.fed = 0
        self.downs = 0
        self.ups = 0

    @rule(seconds=st.floats(0.0, 20.0))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(ailment=st.sampled_from(Ailment))
    def fails(self, ailment: Ailment) -> None:
        was_well = self.health.well
        self.fed += 1
        fell = self.health.failed(ailment, self.now)
        assert fell == (was_well and not self.health.well)
        self.downs += fell
        if fell:
            assert LIMITS.first_wait <= self.health.retry_at - self.now <= LIMITS.longest_wait

    @rule()
    def succeeds(self) -> None:
        state = self.health.state
        self.health.succeeded()
        assert self.health.state is state

    @rule()
    def probes(self) -> None:
        due = self.health.state is State.SICK and self.now >= self.health.retry_at
        assert self.health.begin_probe(self.now) == due

    @precondition(lambda self: self.health.state is State.PROBING)
    @rule(well=st.booleans())
    def probed(self, well: bool) -> None:
        waited = self.health.wait
        self.health.probed(well, self.now)
        self.ups += well
        if not well:
            assert self.health.wait == min(2 * waited, LIMITS.longest_wait)
            assert self.health.retry_at == self.now + self.health.wait

    @precondition(lambda self: self.health.state is State.PROBING)
    @rule()
    def abandons(self) -> None:
        retry_at = self.health.retry_at
        self.health.probe_abandoned()
        assert self.health.retry_at == retry_at <= self.now

    @invariant()
    def holds(self) -> None:
        assert sum(self.health.counts.values()) == self.fed
        assert self.downs - self.ups == (not self.health.well)
        assert self.health.seconds(self.now) >= 0.0


TestBreaker = Breaker.TestCase

"""How often transfers are looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheflow.storage_backends.nixl.pace import Pace, Service

moments = st.floats(0, 1e6)


def test_idle_costs_nothing() -> None:
    """With nothing in flight and nobody to serve there is no next look."""
    assert Pace().wait(5.0, in_flight=False, serving=None) is None
    assert Pace().wait(5.0, in_flight=False, serving=0.05) == 0.05


@given(moments, moments)
def test_looks_follow_what_moves(last: float, later: float) -> None:
    """A wait is at most a sixteenth of the time in which nothing has moved, between 20 us and 20
    ms, and never longer than peers can wait."""
    pace = Pace()
    pace.moved(last)
    now = last + later
    wait = pace.wait(now, in_flight=True, serving=None)
    assert wait is not None
    assert 20e-6 <= wait <= 0.02
    assert wait <= max(20e-6, (now - last) / 16)
    assert pace.wait(now, in_flight=True, serving=0.001) == min(wait, 0.001)


def test_what_hangs_is_hardly_looked_at() -> None:
    """A transfer that hangs for an hour is looked at a few thousand times a minute at most."""
    pace, now, looks = Pace(), 0.0, 0
    pace.moved(now)
    while now < 3600:
        wait = pace.wait(now, in_flight=True, serving=None)
        assert wait is not None
        now, looks = now + wait, looks + 1
    assert looks < 60 * 3100


def test_nobody_to_serve_costs_nothing() -> None:
    assert Service().wait(5.0) is None


@given(moments, moments, st.floats(0.002, 1.0))
def test_looks_for_peers_get_rarer(last: float, later: float, longest: float) -> None:
    """Every millisecond while something is found or expected, then a sixteenth of the time in which
    nothing was, and never longer than asked for."""
    service, now = Service(longest, last), last + later
    wait = service.wait(now)
    assert wait is not None
    assert 0.001 <= wait <= longest
    assert wait <= max(0.001, (now - last) / 16)


def test_a_lease_that_nobody_uses_costs_little() -> None:
    """In ten seconds of it a quarter of the looks of a peer that reads all the time, and less."""
    service, now, looks = Service(0.008, 0.0), 0.0, 0
    while now < 10.0:
        wait = service.wait(now)
        assert wait is not None
        now, looks = now + wait, looks + 1
    assert looks < 1400

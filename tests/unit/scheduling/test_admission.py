"""How much may be under way at once: caps hold, the rest waits its turn, nobody for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage
from tests.unit.scheduling.harness import OBJECTIVES
from tests.unit.scheduling.plays import CHUNK, GRID, STRIDE, Instance, Play, Trouble, instances

pytestmark = pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways

LAYERS = 4
FULL = (1 << LAYERS) - 1


@given(
    instance=instances(sharing=True),
    objective=st.sampled_from(OBJECTIVES),
    requests=st.sampled_from([None, 1, 2, 3]),
    tokens=st.sampled_from([None, 1, 300, 700]),
)
def test_everybody_gets_in_and_finishes(
    instance: Instance, objective: str, requests: int | None, tokens: int | None
) -> None:
    """Any caps, common beginnings, failing stores, cancellations: no more requests inside than
    allowed, whoever is not cancelled finishes, and nobody is left outside."""
    play = Play(instance, "adaptive", objective, max_requests=requests, max_tokens=tokens)
    play.play()
    for spec in play.specs:
        if spec.id not in play.checked.cancelled:
            assert spec.id in play.run.finished_at
    scheduler = play.run.scheduler
    assert scheduler.inside == (0, 0)
    assert scheduler.outside == 0


@given(instance=instances(st.builds(Trouble), sharing=True), most=st.integers(1, 900))
def test_tokens_inside_stay_below_their_cap(instance: Instance, most: int) -> None:
    """Unless one request alone is above it; what is shared counts once. (Nobody is cancelled: an
    heir takes on the tiles that it shared.)"""
    play = Play(instance, "adaptive", OBJECTIVES[0], max_tokens=most)
    play.play()
    assert play.checked.most_tokens <= most


def run(arrivals: list[tuple[float, int]], **caps: int) -> VirtualRun:
    """Requests of so many tokens of prefix, all of them stored, on a link as fast as compute."""
    link = Link(STRIDE / CHUNK * LAYERS * 1e3)
    made = VirtualRun(lambda tile: tile.width * 1e-3 / LAYERS, {"link": link}, **caps)
    for i, (when, prefix) in enumerate(arrivals):
        spec = make_spec(
            prefix,
            prefix + 8,
            layers=LAYERS,
            chunk=CHUNK,
            grid=GRID,
            request_id=f"r{i}",
            arrival=when,
        )
        made.arrive(spec, [Coverage("link", (FULL,) * (prefix // CHUNK), STRIDE)])
    made.run(*(f"r{i}" for i in range(len(arrivals))))
    return made


def test_who_waits_goes_in_by_rank_and_is_counted() -> None:
    """One at a time: the shortest of those outside is next."""
    made = run([(0.0, 1024), (0.01, 2048), (0.02, 256), (0.03, 512)], max_requests=1)
    ends = made.finished_at
    assert sorted(ends, key=lambda name: ends[name]) == ["r0", "r2", "r3", "r1"]
    assert made.scheduler.held_back == 3


def test_a_long_request_is_not_passed_by_short_ones_for_ever() -> None:
    """Short requests arrive faster than they can be served, and would fit beside what is inside
    when the long one, whose turn it is, does not: it still goes in before those that arrive more
    than its own time later (objective `tail`), as without a cap."""
    long = 2048
    stream = [(0.05 * i, 256) for i in range(120)]
    made = run([*stream[:3], (0.2, long), *stream[3:]], max_tokens=2400)
    alone = long * 1e-3
    later = [
        i
        for i, (when, _) in enumerate([*stream[:3], (0.2, long), *stream[3:]])
        if when > 0.2 + alone
    ]
    passed = sum(made.finished_at[f"r{i}"] < made.finished_at["r3"] for i in later)
    assert passed <= 1


@pytest.mark.parametrize("caps", [{"max_requests": 4}, {"max_tokens": 4096}])
def test_a_cap_that_leaves_both_ends_busy_costs_nothing(caps: dict[str, int]) -> None:
    """Eight at once: the last one ends within 3 % of where it ends without a cap, the mean too."""
    batch = [(i * 1e-6, 256 * (1 + i)) for i in range(8)]
    free, capped = run(batch), run(batch, **caps)
    for figure in (max, lambda ends: sum(ends) / len(ends)):
        assert figure(capped.finished_at.values()) <= 1.03 * figure(free.finished_at.values())

"""What a decision costs, in calls instead of seconds: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from bench_scheduler import CHUNK, LAYERS, STRIDE, Timed

from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pytest

    from cacheflow.scheduling.frontier import Frontier

EVENTS: Final = 1000
MOST_CALLS: Final = {0.5: 45, 0.99: 280, 1.0: 600}
"""Of functions, built-in ones included, by quantile; with 1,000 active restores it is 35, 234 and
400 or so."""
ASKED: Final = ("next_compute", "claim", "next_load")
MOST_A_TILE: Final = {"admit": 6, "extend_coverage": 40}
"""Calls for one more tile of a prompt that comes; it is 4 and 32."""


class Counted(Timed):
    """Counts calls where the benchmark takes times."""

    def _time(self, name: str, call: Callable[..., Any], *details: Any) -> Any:
        count = 0

        def tally(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(tally)
        try:
            result = call(*details)
        finally:
            sys.setprofile(before)
        self.calls.setdefault(name, []).append(count)
        return result


def decisions(active: int) -> list[int]:
    """Calls of every decision with so many active restores, in order of size."""
    counted = Counted(active, "tail", seed=active)
    counted.run(EVENTS)
    return sorted(calls for name in ASKED for calls in counted.calls[name])


def quantile(ordered: list[int], share: float) -> int:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def test_decisions_cost_a_bounded_number_of_calls_however_many_are_active() -> None:
    """With a thousand active restores few decisions ask much, none asks very much, and none of
    these quantiles grows with the number of requests."""
    few, many = decisions(50), decisions(1000)
    for share, most in MOST_CALLS.items():
        assert quantile(many, share) <= most
        assert quantile(many, share) <= 1.25 * quantile(few, share)


def test_a_prompt_is_taken_in_with_few_calls_a_tile() -> None:
    """Long prompts are admitted, and what is stored of them noted, between two layers of others."""

    def arrive(tiles: int) -> dict[str, int]:
        counted = Counted(1, "tail", seed=1)
        stop = TileGrid().tile(tiles - 1).stop
        spec = make_spec(stop, stop + 64, layers=LAYERS, chunk=CHUNK, grid=TileGrid())
        stored = Coverage("link", ((1 << LAYERS) - 1,) * (stop // CHUNK), STRIDE)
        scheduler = counted.scheduler
        counted._time("admit", scheduler.admit, spec, load_policy("adaptive"))
        counted._time("extend_coverage", scheduler.extend_coverage, spec.id, stored)
        return {name: counted.calls[name][-1] for name in MOST_A_TILE}

    few, many = arrive(8), arrive(72)
    for name, most in MOST_A_TILE.items():
        assert (many[name] - few[name]) / 64 <= most


def test_a_new_speed_ranks_a_crowd_anew_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known is three times what everybody was ranked by. No call ranks more than some
    dozens anew for that, and soon everybody has been."""
    ranked: list[str] = []
    put_back = BatchScheduler._put_back

    def noting(self: BatchScheduler, frontier: Frontier, now: float) -> None:
        ranked.append(frontier.spec.id)
        put_back(self, frontier, now)

    monkeypatch.setattr(BatchScheduler, "_put_back", noting)
    timed = Timed(300, "tail", seed=1)
    scheduler = timed.scheduler
    timed.run(200)
    everybody = set(scheduler._requests)
    scheduler._speeds = tuple(speed / 3 for speed in scheduler._speeds)
    ranked.clear()
    for _ in range(120):  # layers and loads; ten of the loads at least
        before = len(ranked)
        timed.run(1)
        assert len(ranked) - before < 50
    assert not scheduler._unranked
    assert everybody & {*scheduler._requests} <= {*ranked}

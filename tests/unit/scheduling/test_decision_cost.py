"""What a decision costs, in calls instead of seconds: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from bench_scheduler import Timed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

EVENTS: Final = 1000
MOST_CALLS: Final = {0.5: 45, 0.99: 280, 1.0: 600}
"""Of functions, built-in ones included, by quantile; with 1,000 active restores it is 35, 234 and
400 or so."""
ASKED: Final = ("next_compute", "claim", "next_load")


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

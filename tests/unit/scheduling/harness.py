"""What these tests share: the objectives there are, and models that know the true costs."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from cacheflow.scheduling import BatchScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cacheflow.testing.virtual import VirtualRun
    from cacheflow.types import Tile

__all__ = ["OBJECTIVES", "options", "warm"]

_KNOWN = "objective" in signature(BatchScheduler).parameters
OBJECTIVES: Final = ("tail", "mean", "deadline", "makespan") if _KNOWN else ("",)


def options(objective: str) -> dict[str, Any]:
    """Keywords of a scheduler that pursues ``objective`` (empty: whatever it does)."""
    return {"objective": objective} if objective in OBJECTIVES and objective else {}


def warm(
    run: VirtualRun, tiles: Iterable[Tile], cost: Callable[[Tile], float], nbytes: int
) -> None:
    """Let the models of ``run`` observe true costs: 100 layers, 20 loads of ``nbytes`` a link."""
    known = list(tiles)
    for i in range(100):
        tile = known[i % len(known)]
        run.compute.observe(tile, cost(tile))
    start = run.clock.now()
    for name, link in run.links.items():
        channel, seconds = run.scheduler.channel(name), nbytes / link.bandwidth
        for i in range(20):
            channel.started(-1 - i, nbytes, start + i * seconds)
            channel.ended(-1 - i, start + (i + 1) * seconds, delivered=True)
    run.clock.advance(max(20 * nbytes / link.bandwidth for link in run.links.values()))

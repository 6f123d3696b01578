"""The exact static optimum of small restores, by trying everything.

A job is a grid of cells ``[tile][layer]`` with the seconds each costs to compute and to load. A
static plan gives every request a staircase (``heights[b]`` tiles are recomputed in layer ``b``,
never more than in the layer below), an order to each resource, and no second thoughts: both
resources work back to back. Cells that compute takes depend only on cells that compute takes, so
neither waits for the other until a suffix needs both.

Knows nothing of the scheduler, its models or virtual time; costs are known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, permutations, product
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "Job",
    "Way",
    "makespan_optimum",
    "mean_optimum",
    "restore_optimum",
    "staircases",
    "ttft_optimum",
    "ways",
]

Grid: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Seconds of each cell by either way, ``[tile][layer]``, and of each layer of the suffix."""

    compute: Grid
    load: Grid
    suffix: tuple[float, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.compute[0])


@dataclass(frozen=True, slots=True)
class Way:
    """One staircase: seconds of compute, and of loads up to and including each layer."""

    heights: tuple[int, ...]
    compute: float
    loads: tuple[float, ...]

    @property
    def load(self) -> float:
        return self.loads[-1]


def staircases(tiles: int, layers: int, top: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every non-increasing tuple of ``layers`` heights between 0 and ``tiles``."""
    if layers == 0:
        yield ()
        return
    for height in range((tiles if top is None else top) + 1):
        for rest in staircases(tiles, layers - 1, height):
            yield (height, *rest)


def ways(job: Job) -> list[Way]:
    """Every staircase of ``job`` that no other one beats in compute and in all loads."""
    found = sorted(
        (_way(job, heights) for heights in staircases(len(job.compute), job.layers)),
        key=lambda way: (way.compute, way.load),
    )
    if job.suffix:
        return _undominated(found)
    best, kept = float("inf"), []
    for way in found:
        if way.load < best:
            best = way.load
            kept.append(way)
    return kept


def _way(job: Job, heights: tuple[int, ...]) -> Way:
    tiles = len(job.compute)
    compute = sum(job.compute[t][b] for b, height in enumerate(heights) for t in range(height))
    by_layer = (
        sum(job.load[t][b] for t in range(height, tiles)) for b, height in enumerate(heights)
    )
    return Way(heights, compute, tuple(accumulate(by_layer)))


def _undominated(found: Sequence[Way]) -> list[Way]:
    kept: list[Way] = []
    for way in found:
        if not any(all(a <= b for a, b in zip(k.loads, way.loads, strict=True)) for k in kept):
            kept.append(way)
    return kept


def restore_optimum(job: Job) -> float:
    """Least seconds until every cell of one request is ready."""
    return min(max(way.compute, way.load) for way in ways(job))


def ttft_optimum(job: Job) -> float:
    """Least seconds until the suffix is computed too.

    Loads go layer by layer (earliest deadline first is optimal on one machine) and the suffix comes
    after all recompute (which waits for nothing, so that an exchange never hurts).
    """
    return min(_suffix_end(way.compute, 0.0, way, job.suffix) for way in ways(job))


def _suffix_end(start: float, offset: float, way: Way, suffix: Sequence[float]) -> float:
    """When the suffix ends if compute turns to it at ``start`` and loads begin at ``offset``."""
    if not suffix:
        return max(start, offset + way.load)
    end = start
    for seconds, loads in zip(suffix, way.loads, strict=True):
        end = max(end, offset + loads) + seconds
    return end


def mean_optimum(jobs: Sequence[Job], *, gang: bool = False) -> float:
    """Least mean of the requests' ends, all of them waiting from the start.

    ``gang``: loads, recomputes and suffixes each take the requests in the same order.
    """

    def bound(plan: Sequence[Way]) -> float:
        alone = sorted(max(way.compute, way.load) for way in plan)
        return (sum(alone[:-1]) + max(alone[-1], _work(jobs, plan))) / len(plan)

    return _batch(jobs, bound, lambda ends: sum(ends) / len(ends), gang=gang)


def makespan_optimum(jobs: Sequence[Job], *, gang: bool = False) -> float:
    """Least end of the last request, all of them waiting from the start."""
    return _batch(jobs, lambda plan: _work(jobs, plan), max, gang=gang)


def _work(jobs: Sequence[Job], plan: Sequence[Way]) -> float:
    """No plan ends before its busier resource could."""
    compute = sum(way.compute + sum(job.suffix) for job, way in zip(jobs, plan, strict=True))
    return max(compute, sum(way.load for way in plan))


def _batch(
    jobs: Sequence[Job],
    bound: Callable[[Sequence[Way]], float],
    objective: Callable[[Sequence[float]], float],
    *,
    gang: bool,
) -> float:
    """Over all staircases, the most promising first until no bound is below the best, and orders.

    Non-preemptive: a request's recompute, its suffix and its loads are each done in one go.
    """
    orders = list(_orders(jobs, gang=gang))
    plans = sorted(((bound(plan), plan) for plan in product(*map(ways, jobs))), key=itemgetter(0))
    best = float("inf")
    for least, plan in plans:
        if least >= best:
            break
        best = min(best, *(objective(_ends(jobs, plan, *order)) for order in orders))
    return best


def _orders(
    jobs: Sequence[Job], *, gang: bool
) -> Iterator[tuple[tuple[tuple[int, bool], ...], tuple[int, ...]]]:
    """Orders of compute (``(request, is it its suffix)``) and of loads (requests)."""
    indices = range(len(jobs))
    items = [(r, is_suffix) for r in indices for is_suffix in _parts(jobs[r])]
    for loads in permutations(indices):
        for compute in permutations(items):
            if _is_sound(compute, loads if gang else None):
                yield compute, loads


def _is_sound(compute: Sequence[tuple[int, bool]], loads: Sequence[int] | None) -> bool:
    """Recompute before suffix; prefixes and suffixes each in the order of ``loads``, if given."""
    begun = [r for r, is_suffix in compute if not is_suffix]
    ended = [r for r, is_suffix in compute if is_suffix]
    after = all(compute.index((r, False)) < compute.index((r, True)) for r in ended)
    if loads is None:
        return after
    return after and begun == list(loads) and ended == [r for r in loads if r in ended]


def _parts(job: Job) -> tuple[bool, ...]:
    return (False, True) if job.suffix else (False,)


def _ends(
    jobs: Sequence[Job],
    plan: Sequence[Way],
    compute: Sequence[tuple[int, bool]],
    loads: Sequence[int],
) -> list[float]:
    """When each request is over under one plan."""
    offsets = dict(zip(loads, accumulate((plan[r].load for r in loads), initial=0.0), strict=False))
    now, ends = 0.0, [0.0] * len(jobs)
    for r, is_suffix in compute:
        if is_suffix:
            now = ends[r] = _suffix_end(now, offsets[r], plan[r], jobs[r].suffix)
        else:
            now += plan[r].compute
            ends[r] = max(now, offsets[r] + plan[r].load)
    return ends

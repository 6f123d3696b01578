"""Lower bounds for batches: what no order and no split between the two ends could beat.

Pure arithmetic on seconds per cell, as :mod:`cacheflow.costs.fluid` is for one request. Knows no
scheduler. A cell is named by its place in the order compute takes them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from cacheflow.costs.fluid import concave_hull

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FluidRequest", "batch_fluid_seconds", "mean_lower_bound"]


@dataclass(frozen=True, slots=True)
class FluidRequest:
    """Seconds of every cell of one request by either way.

    ``compute[i]`` and ``load[i]``: cell ``i`` alone on an idle machine, in the order compute takes
    the cells; ``load[i]`` is infinite where nothing stores the cell. ``fixed``: seconds of compute
    that nothing can replace (the suffix). With several channels give ``load`` for all of them
    together (bytes / sum of bandwidths): the bound then assumes that they share perfectly.

    Raises:
        ValueError: the two sequences differ in length, or a time is negative.
    """

    compute: tuple[float, ...]
    load: tuple[float, ...]
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if len(self.compute) != len(self.load):
            raise ValueError(f"{len(self.compute)} compute times for {len(self.load)} load times")
        if min((*self.compute, *self.load, self.fixed), default=0.0) < 0:
            raise ValueError("seconds cannot be negative")


def batch_fluid_seconds(requests: Iterable[FluidRequest]) -> float:
    """Least makespan of ``requests`` on one compute stream and one channel, both fluid.

    Every request gives a curve: load seconds saved against compute seconds spent on its first
    cells. Its concave hull is cut into segments, and the segments of all requests are spent
    steepest first until compute and channel end together. Taking the hull instead of the curve
    can only lower the result, so it stays a bound; for one request whose cells grow dearer with
    their position it equals :func:`cacheflow.costs.fluid_seconds`.
    """
    pool = _Pool()
    for request in requests:
        pool.add(request)
    return pool.makespan()


def mean_lower_bound(requests: Sequence[FluidRequest]) -> float:
    """No order gives a smaller mean completion time of ``requests``, all there at time 0.

    The k-th completion cannot come before the fluid makespan of the k shortest requests (shortest
    by their own fluid time). That is a bound whenever a shorter request is cheaper in both ways,
    as requests to one model are when they differ in length only.
    """
    if not requests:
        return 0.0
    pool, total = _Pool(), 0.0
    for request in sorted(requests, key=lambda each: batch_fluid_seconds([each])):
        pool.add(request)
        total += pool.makespan()
    return total / len(requests)


class _Pool:
    """Segments ``(-saved / spent, spent, saved)`` of all requests, steepest first."""

    def __init__(self) -> None:
        self._segments: list[tuple[float, float, float]] = []
        self._fixed = 0.0
        self._load = 0.0

    def add(self, request: FluidRequest) -> None:
        cells = zip(request.compute, request.load, strict=True)
        self._fixed += request.fixed
        points = [(0.0, 0.0)]
        for compute, load in cells:
            if load == inf:
                # Has to be computed whatever comes before it; that alone is certain.
                self._fixed += compute
            else:
                self._load += load
                points.append((points[-1][0] + compute, points[-1][1] + load))
        for (spent, saved), (more_spent, more_saved) in pairwise(concave_hull(points)):
            cost, gain = more_spent - spent, more_saved - saved
            insort(self._segments, (-gain / cost if cost > 0 else -inf, cost, gain))

    def makespan(self) -> float:
        spent, left = self._fixed, self._load
        for _, cost, gain in self._segments:
            if spent >= left:
                break
            if spent + cost >= left - gain:
                rate = cost + gain
                return spent + cost * ((left - spent) / rate if rate > 0 else 0.0)
            spent, left = spent + cost, left - gain
        return max(spent, left)

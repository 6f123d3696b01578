"""The fluid bound: the least time in which both ends together could make every cell ready.

Pure arithmetic on measured seconds; the yardstick of ``restore efficiency``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["concave_hull", "fluid_seconds"]


def fluid_seconds(compute: Sequence[float], load: Sequence[float]) -> float:
    """``min over staircases of max(sum of compute inside, sum of load outside)``, continuous.

    ``compute[i]`` and ``load[i]``: seconds of cell ``i`` by either way, cells tile by tile. Where
    tiles only get dearer with their position the best staircase is a prefix of that order. Where
    narrow ones come before wide ones it is a few layers of all of them, which cost what those
    tiles cost on average: the concave hull of what is saved over what is spent knows both.

    Raises:
        ValueError: the two sequences differ in length.
    """
    if len(compute) != len(load):
        raise ValueError(f"{len(compute)} compute times for {len(load)} load times")
    points = [(0.0, 0.0)]
    for cell, transfer in zip(compute, load, strict=True):
        points.append((points[-1][0] + cell, points[-1][1] + transfer))
    behind = points[-1][1]
    for (spent, saved), (more_spent, more_saved) in pairwise(concave_hull(points)):
        if more_spent >= behind - more_saved:
            rate = more_spent - spent + more_saved - saved
            part = (behind - saved - spent) / rate if rate > 0 else 0.0
            return spent + min(max(part, 0.0), 1.0) * (more_spent - spent)
    return points[-1][0]


def concave_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The upper concave hull of a monotone curve; points on a straight line are merged."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) >= 2:
            (ax, ay), (bx, by) = hull[-2], hull[-1]
            if (by - ay) * (x - bx) > (y - by) * (bx - ax) * (1 + 1e-12):
                break
            hull.pop()
        hull.append((x, y))
    return hull

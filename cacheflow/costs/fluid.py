"""The fluid bound: the least time in which both ends together could make every cell ready.

Pure arithmetic on measured seconds; the yardstick of ``restore efficiency``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fluid_seconds"]


def fluid_seconds(compute: Sequence[float], load: Sequence[float]) -> float:
    """``min over meeting points of max(sum of compute before, sum of load behind)``, continuous.

    ``compute[i]`` and ``load[i]``: seconds of cell ``i`` by either way, cells in the order compute
    takes them (tile by tile, layer by layer). A prefix of that order is a staircase, and the one
    with the cheapest cells for the loads it saves, since a cell's compute grows with its position
    while its bytes do not. Inside the meeting cell both rates are taken as constant.

    Raises:
        ValueError: the two sequences differ in length.
    """
    if len(compute) != len(load):
        raise ValueError(f"{len(compute)} compute times for {len(load)} load times")
    spent, behind = 0.0, sum(load)
    for cell, transfer in zip(compute, load, strict=True):
        if spent + cell >= behind - transfer:
            rate = cell + transfer
            part = (behind - spent) / rate if rate > 0 else 0.0
            return spent + min(max(part, 0.0), 1.0) * cell
        spent, behind = spent + cell, behind - transfer
    return spent

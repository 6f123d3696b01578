"""The planned staircase of CacheFlow's second version (arXiv 2604.25080 v2).

When a request arrives, the staircase that ends soonest is chosen from the costs as they are known
then, behind what compute and channels have planned for earlier requests; it is kept to the end.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, ClassVar

from cacheflow.scheduling.order import FirstCome
from cacheflow.scheduling.policies.cake import Greedy
from cacheflow.scheduling.rows import dense_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.types import RequestSpec

__all__ = ["Staircase", "best_staircase"]


class Staircase(Greedy):
    """Plans once, first come, first served."""

    name: ClassVar[str] = "staircase"
    order: Order | None = FirstCome()
    plans: ClassVar[bool] = True

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return False

    def plan(self, what: Planned) -> Sequence[int] | None:
        return best_staircase(what)


def best_staircase(what: Planned) -> tuple[int, ...]:
    """How many layers of each tile to recompute: least ``max(compute, load)``, backlogs included.

    The program of the paper runs over (request, layer block). Blocks of one model cost the same, so
    what is left to choose is how many layers of each tile, and the cheapest way to ever more cells
    is one order: layer by layer through the leading tiles that together cost least a second of
    loads saved (:func:`dense_tiles`), then tile by tile, since cells only get dearer with position
    there. So the optimum is found by one walk that stops where the next cell would end later than
    the loads it saves.
    """
    layers = what.num_layers
    compute = what.compute_backlog
    load = what.load_backlog + layers * sum(what.load_seconds)
    heights = [0] * len(what.layer_seconds)
    for t in _cells(dense_tiles(what.load_seconds, what.layer_seconds), len(heights), layers):
        cost, transfer = what.layer_seconds[t], what.load_seconds[t]
        if max(compute + cost, load - transfer) > max(compute, load):
            break
        compute, load = compute + cost, load - transfer
        heights[t] += 1
    return tuple(heights)


def _cells(dense: int, tiles: int, layers: int) -> Iterator[int]:
    """The tile of each next cell."""
    for _ in range(layers):
        yield from range(dense)
    for t in range(dense, tiles):
        yield from repeat(t, layers)

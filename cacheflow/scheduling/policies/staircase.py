"""The planned staircase of CacheFlow's second version (arXiv 2604.25080 v2).

When a request arrives, the staircase that ends soonest is chosen from the costs as they are known
then, behind what compute and channels have planned for earlier requests; it is kept to the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cacheflow.scheduling.order import FirstCome
from cacheflow.scheduling.policies.cake import Greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    The program of the paper runs over (request, layer block). Blocks that cost the same, as layers
    of one model do, and cells that get dearer with position make its optimum a prefix of the order
    (tile, layer): exchanging a cell for an earlier one never costs more. So it is found by one walk
    that stops where the next cell would end later than the loads it saves.
    """
    layers = what.num_layers
    compute = what.compute_backlog
    load = what.load_backlog + layers * sum(what.load_seconds)
    heights = [0] * len(what.layer_seconds)
    for t, (cost, transfer) in enumerate(zip(what.layer_seconds, what.load_seconds, strict=True)):
        for layer in range(layers):
            if max(compute + cost, load - transfer) > max(compute, load):
                return tuple(heights)
            compute, load = compute + cost, load - transfer
            heights[t] = layer + 1
    return tuple(heights)

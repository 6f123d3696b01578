"""Cake (arXiv 2410.03065): two pointers that run towards each other until they meet.

Token-wise: a tile is either recomputed or loaded. Nothing is predicted: compute takes the next tile
from the front and the channel the next from the back as soon as they are free, and each moves on
to the next request when one has nothing left for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cacheflow.scheduling.order import FirstCome, ShortestPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.types import RequestSpec

__all__ = ["Cake", "Greedy", "ShortestCake"]


class Greedy:
    """Takes what is next, asks for no prediction and never races what has begun."""

    hedges: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    plans: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    rows: ClassVar[bool] = False

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return True

    def by_layers(self, spec: RequestSpec) -> bool:
        return False

    def plan(self, what: Planned) -> Sequence[int] | None:
        return None

    def compute(self, compute: float | None, load: float | None) -> bool:
        return True

    def begin(self, gain: float | None) -> bool:
        return True

    def load(self, load: float | None, compute: float | None) -> bool:
        return True


class Cake(Greedy):
    """First come, first served."""

    name: ClassVar[str] = "cake"
    order: Order | None = FirstCome()


class ShortestCake(Greedy):
    """Shortest prompt first: not in the paper, and a strong simple baseline."""

    name: ClassVar[str] = "cake-sjf"
    order: Order | None = ShortestPrompt()

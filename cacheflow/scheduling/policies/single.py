"""The two single ways: the baselines, and what ``adaptive`` must never lose to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cacheflow.scheduling.order import FirstCome
from cacheflow.scheduling.policies.cake import Greedy

if TYPE_CHECKING:
    from cacheflow.scheduling.order import Order
    from cacheflow.types import RequestSpec

__all__ = ["LoadOnly", "RecomputeOnly"]


class LoadOnly(Greedy):
    """Load whatever is stored, as prefix-loading servers do; recompute only what cannot be had."""

    name: ClassVar[str] = "load"
    order: Order | None = FirstCome()

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return False

    def compute(self, compute: float | None, load: float | None) -> bool:
        return False

    def begin(self, gain: float | None) -> bool:
        return False


class RecomputeOnly(Greedy):
    """Ignore every store and prefill on the tile grid."""

    name: ClassVar[str] = "recompute"
    order: Order | None = FirstCome()

    def load(self, load: float | None, compute: float | None) -> bool:
        return False

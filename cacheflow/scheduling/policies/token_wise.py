"""Any policy on an engine that cannot stop between two layers: whole tiles, either way."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import RequestSpec

__all__ = ["TokenWise"]


class TokenWise:
    """``policy``, but a tile is recomputed or loaded as a whole, the suffix waits for all of the
    prefix, and nothing is planned by layers or shared."""

    overlaps: ClassVar[bool] = False
    plans: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    rows: ClassVar[bool] = False

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.order: Order | None = policy.order
        self.hedges = policy.hedges

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return True

    def by_layers(self, spec: RequestSpec) -> bool:
        return False

    def plan(self, what: Planned) -> Sequence[int] | None:
        return None

    def compute(self, compute: float | None, load: float | None) -> bool:
        return self._policy.compute(compute, load)

    def begin(self, gain: float | None) -> bool:
        return self._policy.begin(gain)

    def load(self, load: float | None, compute: float | None) -> bool:
        return self._policy.load(load, compute)

"""The two pointers of CacheFlow's first version (arXiv 2604.25080 v1).

Long prompts are split by tokens, short ones by layers, whose wide passes suit them; the length at
which one becomes better than the other is profiled in the paper. Compute advances all requests
alike, channels go to the request with most left to restore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from cacheflow.scheduling.order import LongestLeft
from cacheflow.scheduling.policies.cake import Greedy

if TYPE_CHECKING:
    from cacheflow.scheduling.order import Order
    from cacheflow.types import RequestSpec

__all__ = ["TwoPointer"]


class TwoPointer(Greedy):
    """Token-wise above the threshold, layer-wise below."""

    name: ClassVar[str] = "two-pointer"
    order: Order | None = LongestLeft()
    threshold_tokens: ClassVar[int] = 16_384
    """Where the two axes cross on our grid, in simulation (docs/notes/policy-experiments.md)."""

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return not self.by_layers(spec)

    def by_layers(self, spec: RequestSpec) -> bool:
        return spec.prefix_tokens < self.threshold_tokens

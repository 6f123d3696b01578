"""The default: both ends at once, each cell to whoever is expected to finish it first.

The rule of Cake (arXiv 2410.03065) and CacheFlow (arXiv 2604.25080), two pointers that meet, with
the meeting point left to what really happens: a cell is claimed only when its turn comes, by the
side that should have it ready earlier. Where the second side could save next to nothing it is left
out, so that it does not disturb the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.types import RequestSpec

__all__ = ["Adaptive"]

_WORTH: Final = 0.03
"""Least share of the load-only time that recompute must promise to save before it starts."""


class Adaptive:
    """Whoever is faster, cell by cell."""

    name: ClassVar[str] = "adaptive"
    order: ClassVar[Order | None] = None
    hedges: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    plans: ClassVar[bool] = False
    shares: ClassVar[bool] = True
    rows: ClassVar[bool] = True

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return False

    def by_layers(self, spec: RequestSpec) -> bool:
        return False

    def plan(self, what: Planned) -> Sequence[int] | None:
        return None

    def compute(self, compute: float | None, load: float | None) -> bool:
        return compute is None or load is None or compute < load

    def begin(self, gain: float | None) -> bool:
        return gain is None or gain >= _WORTH

    def load(self, load: float | None, compute: float | None) -> bool:
        return compute is None or load is None or load <= compute

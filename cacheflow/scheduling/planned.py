"""What a policy that plans ahead is told. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Planned"]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan is made from. Seconds: of one layer of each tile by either way, and until compute
    and channels are done with what is planned for earlier requests."""

    num_layers: int
    layer_seconds: Sequence[float]
    load_seconds: Sequence[float]
    compute_backlog: float
    load_backlog: float

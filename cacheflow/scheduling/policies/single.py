"""The two single ways: the baselines, and what ``adaptive`` must never lose to."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["LoadOnly", "RecomputeOnly"]


class LoadOnly:
    """Load whatever is stored, as prefix-loading servers do; recompute only what cannot be had."""

    name: ClassVar[str] = "load"

    def compute(self, compute: float | None, load: float | None) -> bool:
        return False

    def begin(self, gain: float | None) -> bool:
        return False

    def load(self, load: float | None, compute: float | None) -> bool:
        return True


class RecomputeOnly:
    """Ignore every store and prefill on the tile grid."""

    name: ClassVar[str] = "recompute"

    def compute(self, compute: float | None, load: float | None) -> bool:
        return True

    def begin(self, gain: float | None) -> bool:
        return True

    def load(self, load: float | None, compute: float | None) -> bool:
        return False

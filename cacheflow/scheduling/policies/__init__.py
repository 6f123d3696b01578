"""Policies: who should make a cell ready, given what either way is expected to take.

A policy is three small questions asked in the middle of a decision; it holds no state. The order
of cells and of requests is not its business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.scheduling.policies.single import LoadOnly, RecomputeOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["POLICIES", "Adaptive", "LoadOnly", "Policy", "RecomputeOnly", "load_policy"]


class Policy(Protocol):
    """Times are seconds from now; ``None`` means that nothing was measured yet."""

    @property
    def name(self) -> str:
        """What settings call it."""
        ...

    def compute(self, compute: float | None, load: float | None) -> bool:
        """Recompute the next cell (done in ``compute``) that loads would reach in ``load``?"""
        ...

    def begin(self, gain: float | None) -> bool:
        """Start to recompute at all, when that saves the share ``gain`` of loading everything?"""
        ...

    def load(self, load: float | None, compute: float | None) -> bool:
        """Load the last cells (here in ``load``) that recompute would reach in ``compute``?"""
        ...


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    Adaptive.name: Adaptive,
    LoadOnly.name: LoadOnly,
    RecomputeOnly.name: RecomputeOnly,
}


def load_policy(name: str) -> Policy:
    """The policy called ``name``; ConfigError lists the names there are."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()

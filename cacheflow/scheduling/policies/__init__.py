"""Policies: who should make a cell ready, given what either way is expected to take.

A policy is a few small questions asked in the middle of a decision; it holds no state. Most leave
the order of requests to the scheduler's objective; the published baselines bring their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.scheduling.policies.cake import Cake, ShortestCake
from cacheflow.scheduling.policies.single import LoadOnly, RecomputeOnly
from cacheflow.scheduling.policies.staircase import Staircase
from cacheflow.scheduling.policies.two_pointer import TwoPointer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.types import RequestSpec

__all__ = ["POLICIES", "Policy", "load_policy"]


class Policy(Protocol):
    """Times are seconds from now; ``None`` means that nothing was measured yet."""

    @property
    def name(self) -> str:
        """What settings call it."""
        ...

    @property
    def order(self) -> Order | None:
        """Which request goes first; None leaves that to the scheduler's objective."""
        ...

    @property
    def hedges(self) -> bool:
        """Whether compute may race a load that has begun."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether the suffix starts under the last loads, which then come by layer."""
        ...

    @property
    def shares(self) -> bool:
        """Whether requests that begin alike are restored once, by one of them for all."""
        ...

    @property
    def rows(self) -> bool:
        """Whether narrow leading tiles are recomputed in rows with the wide ones behind them."""
        ...

    def whole_tiles(self, spec: RequestSpec) -> bool:
        """Whether a tile is either recomputed or loaded, never split by layer."""
        ...

    def by_layers(self, spec: RequestSpec) -> bool:
        """Whether compute and loads take a layer of all tiles before the next layer."""
        ...

    @property
    def plans(self) -> bool:
        """Whether :meth:`plan` is to be asked."""
        ...

    def plan(self, what: Planned) -> Sequence[int] | None:
        """Layers of each tile to recompute, fixed on arrival; None to decide cell by cell."""
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
    Cake.name: Cake,
    ShortestCake.name: ShortestCake,
    TwoPointer.name: TwoPointer,
    Staircase.name: Staircase,
}


def load_policy(name: str) -> Policy:
    """The policy called ``name``; ConfigError lists the names there are."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()

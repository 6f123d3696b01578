"""In which order things leave a tier: one small pure file each, the same ones in simulation."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from cacheflow.tiers.eviction.cost_aware import CostAware
from cacheflow.tiers.eviction.lru import Lru
from cacheflow.tiers.eviction.s3fifo import S3Fifo

if TYPE_CHECKING:
    from cacheflow.tiers.eviction.protocol import EvictionPolicy

__all__ = ["CostAware", "EvictionName", "Lru", "S3Fifo", "load_eviction"]

EvictionName: TypeAlias = Literal["lru", "s3fifo", "cost-aware"]

K = TypeVar("K", bound=Hashable)


def load_eviction(name: EvictionName, kind: type[K]) -> EvictionPolicy[K]:
    """An empty policy called ``name`` over keys of ``kind``."""
    match name:
        case "lru":
            return Lru[K]()
        case "s3fifo":
            return S3Fifo[K]()
        case "cost-aware":
            return CostAware[K]()

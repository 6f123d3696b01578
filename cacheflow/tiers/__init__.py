"""Tiers: which store has which cells of a request, and whether a store is fit to be asked."""

from __future__ import annotations

from cacheflow.tiers.guarded import Guarded
from cacheflow.tiers.health import Ailment, Health, HealthLimits
from cacheflow.tiers.located import Located, locate

__all__ = ["Ailment", "Guarded", "Health", "HealthLimits", "Located", "locate"]

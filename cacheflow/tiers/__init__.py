"""Tiers: which store has which cells of a request."""

from __future__ import annotations

from cacheflow.tiers.located import Located, locate

__all__ = ["Located", "locate"]

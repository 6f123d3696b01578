"""Measured costs: what a tile costs to compute and a byte costs to load, learned online."""

from __future__ import annotations

from cacheflow.costs.channel import ChannelModel
from cacheflow.costs.compute import ComputeModel
from cacheflow.costs.fluid import fluid_seconds

__all__ = ["ChannelModel", "ComputeModel", "fluid_seconds"]

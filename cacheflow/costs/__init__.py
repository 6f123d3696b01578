"""Measured costs: what a tile costs to compute and a byte costs to load, learned online."""

from __future__ import annotations

from cacheflow.costs.channel import ChannelModel
from cacheflow.costs.checks import CostChecks
from cacheflow.costs.compute import ComputeModel
from cacheflow.costs.fluid import fluid_seconds
from cacheflow.costs.kept import KeptCosts
from cacheflow.costs.profile import ChannelProfile, ComputeProfile
from cacheflow.costs.store import COSTS_FILE, CostStore, channel_key, compute_key

__all__ = [
    "COSTS_FILE",
    "ChannelModel",
    "ChannelProfile",
    "ComputeModel",
    "ComputeProfile",
    "CostChecks",
    "CostStore",
    "KeptCosts",
    "channel_key",
    "compute_key",
    "fluid_seconds",
]

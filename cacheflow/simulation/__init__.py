"""The real scheduler in virtual time: modelled GPUs, links and tiers, traces and reports.

Everything that decides is :mod:`cacheflow.scheduling`, unchanged; only time and costs are made up.
"""

from __future__ import annotations

from cacheflow.simulation.agents import Agents, AgentSettings
from cacheflow.simulation.bounds import FluidRequest, batch_fluid_seconds, mean_lower_bound
from cacheflow.simulation.cluster import Cluster
from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.hardware import Device, Machine, ModelShape
from cacheflow.simulation.jobs import Cut, Job, Workload
from cacheflow.simulation.links import SerialLink, SharedPipe
from cacheflow.simulation.node import Node
from cacheflow.simulation.presets import load_link, load_machine
from cacheflow.simulation.records import Record, Usage, Work
from cacheflow.simulation.results import Quantiles, Summary
from cacheflow.simulation.scenario import Channel, Run, Scenario, mean_gap, simulate
from cacheflow.simulation.traces import load_trace
from cacheflow.simulation.workloads import Lengths, Synthetic, poisson, synthetic

__all__ = [
    "AgentSettings",
    "Agents",
    "Channel",
    "Cluster",
    "Cut",
    "Device",
    "EventLoop",
    "FluidRequest",
    "Job",
    "Lengths",
    "Machine",
    "ModelShape",
    "Node",
    "Quantiles",
    "Record",
    "Run",
    "Scenario",
    "SerialLink",
    "SharedPipe",
    "Summary",
    "Synthetic",
    "Usage",
    "Work",
    "Workload",
    "batch_fluid_seconds",
    "load_link",
    "load_machine",
    "load_trace",
    "mean_gap",
    "mean_lower_bound",
    "poisson",
    "simulate",
    "synthetic",
]

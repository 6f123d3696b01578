"""What the options of ``cacheflow simulate`` mean: machines, links, workloads. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheflow.errors import ConfigError
from cacheflow.scheduling import load_policy
from cacheflow.simulation.agents import Agents, AgentSettings
from cacheflow.simulation.presets import load_link, load_machine
from cacheflow.simulation.scenario import Channel, Scenario, mean_gap
from cacheflow.simulation.traces import load_trace
from cacheflow.simulation.workloads import Synthetic, parse_lengths, poisson, synthetic
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.simulation.jobs import Job, Workload

__all__ = ["Shape", "channels", "policies", "scenario", "workload"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Independent requests. ``load`` 0: all at once."""

    requests: int
    lengths: str
    suffix: int
    coverage: float
    holes: float
    load: float


def scenario(preset: str, cells: str, links: tuple[Channel, ...], **settings: Any) -> Scenario:
    """``cells``: ``2048x4`` (tokens of a tile x layers of a block) or ``exact`` (the real grid);
    ``settings``: the other fields of :class:`Scenario`."""
    if cells == "exact":
        return Scenario(
            load_machine(preset, layers_per_block=1), links, grid=TileGrid(), **settings
        )
    tile, times, layers = cells.partition("x")
    if not (times and tile.isdecimal() and layers.isdecimal() and int(tile) and int(layers)):
        raise ConfigError(f"--cells {cells!r} is neither TOKENSxLAYERS such as 2048x4 nor 'exact'")
    machine = load_machine(preset, layers_per_block=int(layers))
    return Scenario(machine, links, grid=TileGrid(head=(), tail=int(tile)), **settings)


def channels(text: str, uplink: str | None) -> tuple[Channel, ...]:
    """``25gbps,nvme@0.5``; with ``uplink`` the last of them meets in a pipe of that rate."""
    found = []
    for part in text.split(","):
        name, at, share = part.strip().partition("@")
        found.append(Channel(load_link(name), _share(part, share) if at else 1.0))
    if uplink is not None:
        found[-1] = replace(found[-1], shared_bandwidth=load_link(uplink, "--uplink").bandwidth)
    return tuple(found)


def _share(part: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"--link {part!r}: behind @ comes a share above 0 and at most 1")
    return share


def policies(text: str) -> list[str]:
    """Names, each once, each known."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        load_policy(name)
    if not names:
        raise ConfigError("--policy names none: give for instance cake,adaptive")
    return names


def workload(
    scenario: Scenario, shape: Shape, trace: Path | None, speed: float, agents: int, turns: int
) -> tuple[Workload, int, list[Job]]:
    """Requests from a trace, of agent sessions or independent ones; how many; and the jobs, where
    none depends on another's end."""
    if trace is not None and agents:
        raise ConfigError("--trace and --agents exclude each other")
    if trace is not None:
        replayed = load_trace(trace, limit=shape.requests, speed=speed)
        return replayed, len(replayed.first()), []
    if agents:
        sessions = Agents(AgentSettings(sessions=agents, turns=turns), scenario.seed)
        return sessions, len(sessions), []
    jobs = _independent(scenario, shape)
    how = f"at load {shape.load:g}" if shape.load else "all at once"
    return Synthetic(f"{len(jobs)} requests {how}", jobs), len(jobs), jobs


def _independent(scenario: Scenario, shape: Shape) -> list[Job]:
    jobs = synthetic(
        shape.requests,
        parse_lengths(shape.lengths),
        chunk_tokens=scenario.chunk_tokens,
        suffix_tokens=shape.suffix,
        coverage=shape.coverage,
        holes=shape.holes,
        seed=scenario.seed,
    )
    if shape.load:
        return poisson(jobs, mean_gap(scenario, jobs, shape.load), scenario.seed)
    return jobs

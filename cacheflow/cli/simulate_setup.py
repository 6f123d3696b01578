"""What the options of ``cacheflow simulate`` mean: machines, links, workloads. Prints nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError
from cacheflow.scheduling import load_policy
from cacheflow.simulation.agents import Agents, AgentSettings
from cacheflow.simulation.presets import load_link, load_machine
from cacheflow.simulation.scenario import Channel, mean_gap
from cacheflow.simulation.traces import load_trace
from cacheflow.simulation.workloads import Synthetic, parse_lengths, poisson, synthetic
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.simulation.hardware import Machine
    from cacheflow.simulation.jobs import Job, Workload
    from cacheflow.simulation.scenario import Scenario

__all__ = ["agent_sessions", "channels", "independent", "machine", "policies", "replayed"]


def machine(preset: str, cells: str) -> tuple[Machine, TileGrid]:
    """``cells``: ``2048x4`` (tokens of a tile x layers of a block) or ``exact`` (the real grid)."""
    if cells == "exact":
        return load_machine(preset, layers_per_block=1), TileGrid()
    tile, times, layers = cells.partition("x")
    if not (times and tile.isdecimal() and layers.isdecimal() and int(tile) and int(layers)):
        raise ConfigError(f"--cells {cells!r} is neither TOKENSxLAYERS such as 2048x4 nor 'exact'")
    return load_machine(preset, layers_per_block=int(layers)), TileGrid(head=(), tail=int(tile))


def channels(text: str, uplink: str | None) -> tuple[Channel, ...]:
    """``25gbps,nvme@0.5``; with ``uplink`` the last of them meets in a pipe of that rate."""
    found = []
    for part in text.split(","):
        name, at, share = part.strip().partition("@")
        found.append(Channel(load_link(name), _share(part, share) if at else 1.0))
    if uplink is not None:
        found[-1] = replace(found[-1], shared_bandwidth=load_link(uplink).bandwidth)
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


def replayed(path: Path, limit: int, speed: float) -> tuple[Workload, int]:
    """A trace and how many requests it has."""
    workload = load_trace(path, limit=limit, speed=speed)
    return workload, len(workload.first())


def agent_sessions(sessions: int, turns: int, seed: int) -> tuple[Workload, int]:
    """Agent sessions and how many requests they make."""
    workload = Agents(AgentSettings(sessions=sessions, turns=turns), seed)
    return workload, len(workload)


def independent(
    scenario: Scenario,
    requests: int,
    lengths: str,
    *,
    suffix: int,
    coverage: float,
    holes: float,
    load: float,
) -> tuple[Workload, list[Job]]:
    """Synthetic requests: at random with ``load``, or all at once if that is 0."""
    jobs = synthetic(
        requests,
        parse_lengths(lengths),
        chunk_tokens=scenario.chunk_tokens,
        suffix_tokens=suffix,
        coverage=coverage,
        holes=holes,
        seed=scenario.seed,
    )
    if load:
        jobs = poisson(jobs, mean_gap(scenario, jobs, load), scenario.seed)
    how = f"at load {load:g}" if load else "all at once"
    return Synthetic(f"{len(jobs)} requests {how}", jobs), jobs

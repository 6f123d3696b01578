"""Runs of policies in virtual time and the tables that come of them, for ``bench_policies``.

Knows how a run is made (any policy, also one a benchmark defines, and links in trouble) and how a
table is written; knows no experiment and no published figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cacheflow.costs import ChannelProfile, ComputeModel
from cacheflow.scheduling import POLICIES, BatchScheduler, Policy
from cacheflow.simulation import (
    Channel,
    EventLoop,
    Job,
    Node,
    Scenario,
    SerialLink,
    Synthetic,
    load_link,
    load_machine,
    simulate,
)
from cacheflow.simulation.presets import LinkPreset
from cacheflow.simulation.results import summarise
from cacheflow.simulation.scenario import shown_tiles
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from cacheflow.simulation import FluidRequest, Record, Summary
    from cacheflow.types import Load

Cell = str | float | int
Row = tuple[Cell, ...]
FINE: Final = TileGrid()
"""The grid that serves: 512, 512, 1024, then 2048."""
LLAMA: Final = "h100:llama-3.1-8b"
QWEN: Final = "h100:qwen3-8b"


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """What an experiment found. The last cell of a row is its verdict, where there is one."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def markdown(self) -> str:
        """As a section of a document."""
        lines = [f"### {self.title}", ""]
        lines += [_line(self.heads), _line(["---"] * len(self.heads))]
        lines += [_line([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join([*lines, *(("", self.note) if self.note else ()), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.3f}"


def verdict(*holds: bool) -> str:
    """Whether every one ``holds``."""
    return "kept" if all(holds) else "**not kept**"


def percent(share: float) -> str:
    """``0.123`` as ``12.3 %``."""
    return f"{100 * share:.1f} %"


def tokens(count: int) -> str:
    """``4096`` as ``4k``."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``trouble``: ``slow`` halves the link's speed every other 5 s, ``hang`` lets one
    load in 500 never answer (given up after half a second); cost models know of neither."""

    scenario: Scenario
    jobs: tuple[Job, ...]
    policy: str | type[Policy]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave; ``ttft`` in seconds, in the order of the first tokens."""

    summary: Summary
    ttft: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.summary.ttft.mean


Runner = Callable[[Sequence[Case]], list[Outcome]]


def run(case: Case) -> Outcome:
    """A policy by name goes through ``simulate``, one made here through :func:`drive`."""
    if isinstance(case.policy, str) and not case.trouble:
        found = simulate(case.scenario, Synthetic("jobs", case.jobs), case.policy)
        return Outcome(found.summary, tuple(record.ttft for record in found.records))
    return drive(case)


def drive(case: Case) -> Outcome:
    """As ``simulate`` does for one GPU, but with any policy and with trouble."""
    scenario, loop = case.scenario, EventLoop()
    compute = ComputeModel(*scenario.machine.block_flops)
    scheduler = BatchScheduler(compute, loop, objective=scenario.objective)
    _warm(scenario, scheduler, compute)
    make = POLICIES[case.policy] if isinstance(case.policy, str) else case.policy
    speed = _every_other if case.trouble == "slow" else None
    node = Node(
        loop,
        scheduler,
        scenario.machine.block_seconds,
        {
            each.name: SerialLink(loop, each.link.bandwidth, each.link.latency, speed=speed)
            for each in scenario.channels
        },
        fate=_hangs if case.trouble == "hang" else None,
        load_deadline=0.5,
    )
    placement = scenario.placement(named=False)
    done: list[tuple[Record, FluidRequest]] = []

    def arrive(job: Job) -> None:
        placed = placement.place(job, 0)
        record = node.admit(placed.spec, make(), placed.coverage)
        done.append((record, scenario.fluid(placed)))

    for job in case.jobs:
        loop.at(job.arrival, arrive, job)
    loop.run()
    if node.unfinished:
        raise RuntimeError(f"{case.policy}: {node.unfinished} requests never ended")
    summary = summarise(str(case.policy), [node], done, scenario.machine.layer_blocks)
    return Outcome(summary, tuple(record.ttft for record, _ in done))


def _warm(scenario: Scenario, scheduler: BatchScheduler, compute: ComputeModel) -> None:
    width = scenario.grid.tail
    for tile in shown_tiles(scenario.grid, scenario.chunk_tokens):
        compute.observe(tile, scenario.machine.block_seconds(tile))
    for each in scenario.channels:
        unit = float(scenario.machine.block_bytes(width))
        profile = ChannelProfile(each.link.latency, 1 / each.link.bandwidth, unit)
        scheduler.channel(each.name).prime(profile)


def _every_other(now: float) -> float:
    return 0.5 if int(now / 5) % 2 else 1.0


def _hangs(load: Load, now: float) -> bool | None:
    return None if load.id % 500 == 0 else True


def setting(
    preset: str,
    *links: str,
    layers: int = 1,
    chunk_tokens: int = 256,
    grid: TileGrid = FINE,
    objective: str = "tail",
) -> Scenario:
    """One GPU; cells of one layer on the grid that serves, unless told otherwise."""
    machine = load_machine(preset, layers_per_block=layers)
    channels = tuple(Channel(load_link(link)) for link in links)
    return Scenario(machine, channels, chunk_tokens=chunk_tokens, grid=grid, objective=objective)


def single(prefix: int, suffix: int = 256) -> tuple[Job, ...]:
    """One request on an idle machine."""
    return (Job("r", 0.0, prefix + suffix, prefix_tokens=prefix),)


def balanced(scenario: Scenario, prefix: int, ratio: float = 1.0) -> Scenario:
    """The same with one link over which ``prefix`` tokens load ``ratio`` times as fast as they
    are recomputed."""
    machine = scenario.machine
    layer = sum(machine.block_seconds(tile) for tile in scenario.grid.split(0, prefix))
    rate = machine.model.token_bytes * prefix * ratio / (layer * machine.layer_blocks)
    link = LinkPreset("link", rate, 50e-6, "by compute:I/O")
    return replace(scenario, channels=(Channel(link),))

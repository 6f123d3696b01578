"""``cacheflow simulate``: the same scheduler in virtual time, on GPUs and links one has not got."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from cacheflow.cli.output import AsJson, figures, print_json, progress
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.progress import Progress
    from rich.table import Table

    from cacheflow.simulation.jobs import Job, Workload
    from cacheflow.simulation.scenario import Run, Scenario

__all__ = ["simulate"]

TraceFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Requests from a file in Mooncake's format (JSON lines).")
]
ReportFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write an HTML page with plots here.")
]
_TOLD_EVERY: Final = 32
"""Requests between two movements of the bar."""
_BATCH: Final = 4
"""Requests in the report's picture of both pointers."""


def simulate(
    preset: Annotated[
        str, typer.Option(help="GPU:MODEL, e.g. h100:llama-3.1-8b, a100x4:llama-3.1-70b.")
    ] = "h100:llama-3.1-8b",
    link: Annotated[
        str,
        typer.Option(
            help="Links of each GPU: 25gbps, nvme, pcie4, pcie5, dram; several with a comma; "
            "nvme@0.5 holds half of each prefix. With a trace or agents, of two links the first "
            "is local to its GPU."
        ),
    ] = "25gbps",
    uplink: Annotated[
        str | None,
        typer.Option(help="The last link of all GPUs meets in one pipe of this rate (400gbps)."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many (of a trace: at most).")] = 200,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, each with its own scheduler.")] = 1,
    lengths: Annotated[
        str, typer.Option(help="Prefixes: lognormal:MEAN:SIGMA, uniform:1k:32k, 8k or 512,1k,4k.")
    ] = "lognormal:15000:1.0",
    suffix: Annotated[int, typer.Option(min=1, help="New tokens behind each prefix.")] = 256,
    coverage: Annotated[float, typer.Option(help="Share of each prefix that is stored.")] = 1.0,
    holes: Annotated[float, typer.Option(help="Probability that a stored chunk is gone.")] = 0.0,
    load: Annotated[
        float,
        typer.Option(
            help="Random arrivals, as a share of what GPUs and links together can carry; "
            "0: all at once."
        ),
    ] = 0.6,
    trace: TraceFile = None,
    speed: Annotated[float, typer.Option(help="Play the trace this much faster.")] = 1.0,
    agents: Annotated[
        int, typer.Option(min=0, help="Instead: so many agent sessions with tool pauses.")
    ] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each agent session.")] = 8,
    policy: Annotated[
        str, typer.Option(help="Policies to compare, with commas.")
    ] = "recompute,load,cake,adaptive",
    objective: Annotated[str, typer.Option(help="tail, mean, deadline or makespan.")] = "tail",
    router: Annotated[
        str, typer.Option(help="Of requests to GPUs: round-robin, least-work or affinity.")
    ] = "least-work",
    cells: Annotated[
        str, typer.Option(help="Tokens of a tile x layers of a block; 'exact': the real grid.")
    ] = "2048x4",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a stored chunk.")] = 512,
    decode_share: Annotated[
        float, typer.Option(help="Share of the compute that decode keeps for itself.")
    ] = 0.0,
    failing: Annotated[float, typer.Option(help="Probability that a load fails.")] = 0.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin with cost models that know nothing.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same result.")] = 0,
    report: ReportFile = None,
    json: AsJson = False,
) -> None:
    """Simulate restores on modelled GPUs and links, with the scheduler that really runs.

    Compares policies on the same requests: times to first token, how busy compute and links were,
    and how near that is to the fluid bound. Presets say in cacheflow/simulation/presets.py where
    their numbers come from.
    """
    from cacheflow.cli import simulate_setup as setup
    from cacheflow.simulation.scenario import Scenario

    machine, grid = setup.machine(preset, cells)
    scenario = Scenario(
        machine,
        setup.channels(link, uplink),
        gpus=gpus,
        chunk_tokens=chunk,
        grid=grid,
        objective=objective,
        router=router,
        warm=not cold,
        failing=failing,
        decode_share=decode_share,
        seed=seed,
    )
    if trace is not None and agents:
        raise ConfigError("--trace and --agents exclude each other")
    jobs: list[Job] = []
    if trace is not None:
        workload, total = setup.replayed(trace, requests, speed)
    elif agents:
        workload, total = setup.agent_sessions(agents, turns, seed)
    else:
        workload, jobs = setup.independent(
            scenario,
            requests,
            lengths,
            suffix=suffix,
            coverage=coverage,
            holes=holes,
            load=load,
        )
        total = requests
    settings = {
        "preset": machine.name,
        "link": link + (f" in {uplink}" if uplink else ""),
        "gpus": gpus,
        "workload": workload.name,
        "objective": objective,
        "cells": cells,
        "seed": seed,
    }
    asked = _Asked(scenario, workload, total, jobs, settings)
    runs = _compare(asked, setup.policies(policy), report)
    if json:
        print_json({"settings": settings, "policies": [run.summary.as_json() for run in runs]})
    else:
        _show(settings, runs, report)


# -- running and showing -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be simulated. ``jobs``: the requests, where none depends on another's end."""

    scenario: Scenario
    workload: Workload
    total: int
    jobs: Sequence[Job]
    settings: dict[str, Any]


def _compare(asked: _Asked, policies: Sequence[str], report: Path | None) -> list[Run]:
    """The same requests under every policy; the page at ``report`` with them."""
    from cacheflow.simulation.scenario import simulate as run

    with progress() as bar:
        runs = [
            run(
                asked.scenario,
                asked.workload,
                name,
                progress=_telling(bar, name, asked.total),
                record=report is not None,
            )
            for name in policies
        ]
        if report is not None:
            _write(bar, report, asked, runs)
    return runs


def _telling(bar: Progress, name: str, total: int) -> Callable[[int], None]:
    task = bar.add_task(name, total=total)

    def tell(done: int) -> None:
        if done == total or not done % _TOLD_EVERY:
            bar.update(task, completed=done)

    return tell


def _write(bar: Progress, path: Path, asked: _Asked, runs: Sequence[Run]) -> None:
    from cacheflow.simulation.maps import LENGTHS, RATIOS, win_map
    from cacheflow.simulation.report import render_report
    from cacheflow.simulation.scenario import simulate as run
    from cacheflow.simulation.workloads import Synthetic

    names, batch = [each.policy for each in runs], None
    if asked.jobs:
        few = Synthetic("batch", [replace(job, arrival=0.0) for job in asked.jobs[:_BATCH]])
        shown = "adaptive" if "adaptive" in names else names[-1]
        batch = run(replace(asked.scenario, gpus=1), few, shown, timeline=True)
    tell = _telling(bar, "map", len(RATIOS) * len(LENGTHS))
    points = win_map(asked.scenario, names, progress=tell)
    page = render_report("CacheFlow in virtual time", asked.settings, runs, batch, points)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path}: {error.strerror}") from error


def _show(settings: dict[str, Any], runs: Sequence[Run], report: Path | None) -> None:
    figures().print(_table(settings, runs))
    if report is not None:
        figures().print(f"report: {report}", soft_wrap=True)


def _table(settings: dict[str, Any], runs: Sequence[Run]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{settings['preset']}, {settings['link']}, {settings['workload']}"
    heading = f"seconds to first token\n{title}"
    table = Table(title=heading, box=SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=0)
    resources = list(runs[0].summary.utilisation)
    table.add_column("policy ", no_wrap=True)
    for name in ("mean", "P50", "P90", "P99", *resources, "fluid", "recomp."):
        table.add_column(f"  {name}", justify="right", no_wrap=True)
    for summary in (run.summary for run in runs):
        restored = sum(summary.sources.values())
        share = summary.sources.get("recompute", 0.0) / restored if restored else 0.0
        ttft = summary.ttft
        table.add_row(
            summary.policy,
            *(f"{value:.3f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
            *(f"{summary.utilisation[name]:.0%}" for name in resources),
            f"{summary.efficiency:.3f}",
            f"{share:.0%}",
        )
    table.caption_justify = "left"
    table.caption = "fluid: bound / taken; resources: useful busy share while a prefix waits"
    return table

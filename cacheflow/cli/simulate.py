"""``cacheflow simulate``: the same scheduler in virtual time, on GPUs and links one has not got."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cacheflow.cli import simulate_options as option  # noqa: TC001 - typer evaluates annotations
from cacheflow.cli.output import AsJson, figures, print_json, progress
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.progress import Progress
    from rich.table import Table

    from cacheflow.simulation.jobs import Job, Workload
    from cacheflow.simulation.scenario import Run, Scenario

__all__ = ["simulate"]

_TOLD_EVERY: Final = 32
"""Requests between two movements of the bar."""
_MANY: Final = 1000
"""Requests of which a hundredth says something."""
_BATCH: Final = 4
"""Requests in the report's picture of both pointers."""


def simulate(
    preset: option.Preset = "h100:llama-3.1-8b",
    link: option.Links = "25gbps",
    uplink: option.Uplink = None,
    requests: option.Requests = 200,
    gpus: option.Gpus = 1,
    lengths: option.Lengths = "lognormal:15000:1.0",
    suffix: option.Suffix = 256,
    coverage: option.Coverage = 1.0,
    holes: option.Holes = 0.0,
    load: option.Load = 0.6,
    trace: option.TraceFile = None,
    speed: option.Speed = 1.0,
    agents: option.Agents = 0,
    turns: option.Turns = 8,
    policy: option.Policies = "recompute,load,cake,adaptive",
    objective: option.Objective = "tail",
    router: option.Router = "least-work",
    cells: option.Cells = "2048x4",
    chunk: option.Chunk = 512,
    decode_share: option.DecodeShare = 0.0,
    failing: option.Failing = 0.0,
    cold: option.Cold = False,
    seed: option.Seed = 0,
    report: option.ReportFile = None,
    json: AsJson = False,
) -> None:
    """Simulate restores on modelled GPUs and links, with the scheduler that really runs.

    Compares policies on the same requests: times to first token, how busy compute and links were,
    and how near that is to the fluid bound. Presets say in cacheflow/simulation/presets.py where
    their numbers come from.
    """
    from cacheflow.cli import simulate_setup as setup

    scenario = setup.scenario(
        preset,
        cells,
        setup.channels(link, uplink),
        gpus=gpus,
        chunk_tokens=chunk,
        objective=objective,
        router=router,
        warm=not cold,
        failing=failing,
        decode_share=decode_share,
        seed=seed,
    )
    shape = setup.Shape(requests, lengths, suffix, coverage, holes, load)
    workload, total, jobs = setup.workload(scenario, shape, trace, speed, agents, turns)
    over = link + (f" in {uplink}" if uplink else "")
    settings: dict[str, Any] = {"preset": scenario.machine.name, "link": over, "gpus": gpus}
    settings |= {"workload": workload.name, "objective": objective, "cells": cells}
    settings |= {"chunk": chunk, "seed": seed}
    asked = _Asked(scenario, workload, total, jobs, settings)
    runs = _compare(asked, setup.policies(policy), report)
    if json:
        print_json({"settings": settings, "policies": [run.summary.as_json() for run in runs]})
    else:
        _show(asked, runs, report)


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

    if report is not None and not report.parent.is_dir():  # said before the work, not after it
        raise ConfigError(f"--report {report}: there is no folder {report.parent}")
    if report is not None and report.is_dir():
        raise ConfigError(f"--report {report}: that is a folder; name a file in it")
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


def _show(asked: _Asked, runs: Sequence[Run], report: Path | None) -> None:
    figures().print(_table(asked, runs))
    if report is not None:
        figures().print(f"report: {report}", soft_wrap=True)


def _table(asked: _Asked, runs: Sequence[Run]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    settings = asked.settings
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
    if asked.jobs:
        table.caption += (
            f"\nprefixes: rounded to chunks of {settings['chunk']} tokens, at least one"
        )
    if 1 < runs[0].summary.requests < _MANY:
        table.caption += "\nP99 of so few requests is one of the longest: compare several --seed"
    return table

"""Every fault on every medium, in every set-up of tiers, with a real engine over them.

A cell is healthy first, then sick while requests come one at a time, three at once and with
something to store, then well again. All of them have to complete with the tokens of a cold run; the
first token may take 1.10 times recompute alone (the mean of right before and right after, through
the same sessions); the tier has to be taken back and to serve again, what was damaged has to be
repaired by the next save, and no lease, task, staging byte, open or temporary file may be left.

Other programs share the machine, so a cell is run again: once if its three recomputes differ by
more than a tenth, twice if it is over its time. What is told is the median of the runs whose
recomputes agree; where none do, the run in which they agree best, and a question mark.

    make bench-faults
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from fault_cells import FAULTS, MEDIA, REMOTE, SETUPS, Cell, Limits, Seen, Stage
from rigs import model_name, model_options, opened, prompts_of, show, start

from cacheflow.cli.output import progress
from cacheflow.testing.faults import FaultKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.cli.bench_rig import Rig

LIMITS: Final = Limits(seconds=0.0)
TRIES: Final = 3
STEADY: Final = 0.10
"""By how much the recomputes of a cell may differ."""
TRAINED: Final = tuple(map(FaultKind, ("hang", "flip", "disconnect")))
"""Faults that the trained model sees, on nvme and behind a link."""


def matrix(media: Sequence[str], setups: Sequence[str]) -> Iterator[Cell]:
    """All cells, set-up by set-up."""
    for setup, medium, fault in itertools.product(setups, media, FAULTS):
        yield Cell(fault, medium, setup)


def few() -> Iterator[Cell]:
    """The cells for a model that takes seconds a request."""
    for cell in matrix(("nvme", "throttled"), ("alone",)):
        if cell.fault.kind in TRAINED and cell.fault.operation == "load":
            yield cell


async def stage_of(rig: Rig, tokens: int, folder: Path, media: Sequence[str]) -> Stage:
    """Prompts of ``tokens`` and half as many more; the link as fast as recompute."""
    suffix = 16
    (longer,) = await prompts_of(rig, [tokens + tokens // 2], suffix)
    short = rig.prompt(longer.tokens[: tokens + suffix], suffix)
    async with rig.restorer({}) as alone:
        seconds = (await rig.alone(alone, short, "recompute")).restored_seconds
    bandwidth = rig.nbytes(tokens) / seconds
    stage = Stage(
        rig.engine, folder, short.tokens, longer.tokens, rig.costs, bandwidth, media=media
    )
    await stage.prepare()
    return stage


async def settle(stage: Stage, cell: Cell, limits: Limits = LIMITS) -> list[Seen]:
    """Run ``cell``, again while only its time is wrong or nobody knows what it should be."""
    runs: list[Seen] = []
    while True:
        runs.append(await stage.run(cell))
        over = any(run.excess(limits) > 0.0 for run in runs if not run.wrong)
        steady = any(run.disagreement <= STEADY for run in runs)
        if runs[-1].wrong or len(runs) >= (TRIES if over else 1 if steady else 2):
            return runs


def verdict(runs: Sequence[Seen]) -> Seen:
    """The run that speaks for its cell: one in which something was wrong, else the median of those
    whose recomputes agree (the worse of two), else the one in which they agree best."""
    if runs[-1].wrong:
        return runs[-1]
    steady = sorted((run for run in runs if run.disagreement <= STEADY), key=lambda run: run.ratio)
    if steady:
        return steady[len(steady) // 2]
    return min(runs, key=lambda run: run.disagreement)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every cell asked for."""
    cells = list(few() if not options.quick else matrix(options.media, options.setups))
    cells = cells[options.skip :: options.every]
    with TemporaryDirectory() as scratch:
        async with opened(options) as rig:
            stage = await stage_of(rig, options.tokens, Path(scratch), options.media)
            try:
                with progress() as bar:
                    task = bar.add_task("cells", total=len(cells))
                    runs = []
                    for cell in cells:
                        runs.append(await settle(stage, cell))
                        bar.advance(task)
            finally:
                await stage.aclose()
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "cells": [record(each) for each in runs],
    }


def record(runs: Sequence[Seen]) -> dict[str, Any]:
    """What is told of a cell."""
    last = verdict(runs)
    return {
        "fault": str(last.cell.fault.kind),
        "operation": last.cell.fault.operation,
        "medium": last.cell.medium,
        "setup": last.cell.setup,
        "ttft_s": last.ttft,
        "recompute_s": last.recompute,
        "ratio": last.ratio,
        "excess_s": last.excess(LIMITS),
        "disagreement": last.disagreement,
        "waited_s": last.waited,
        "strikes": last.strikes,
        "runs": len(runs),
        "ratios": [run.ratio for run in runs],
        "wrong": last.wrong,
    }


def tell(found: dict[str, Any]) -> None:
    """A table a set-up: faults down, media across; each entry the worst time over recompute's."""
    cells = found["cells"]
    for setup in dict.fromkeys(cell["setup"] for cell in cells):
        of = [cell for cell in cells if cell["setup"] == setup]
        media = list(dict.fromkeys(cell["medium"] for cell in of))
        rows: dict[str, dict[str, str]] = {}
        for cell in of:
            name = f"{cell['fault']} @ {cell['operation']}"
            rows.setdefault(name, {})[cell["medium"]] = _entry(cell)
        table = [[name, *(row.get(medium, "") for medium in media)] for name, row in rows.items()]
        title = f"{setup}: {found['model']}, {found['tokens']} tokens"
        show(title, ["fault @ operation", *media], table, _caption(of))
    for cell in cells:
        for what in cell["wrong"]:
            print(f"{cell['fault']}@{cell['operation']} {cell['medium']} {cell['setup']}: {what}")


def _caption(cells: Sequence[dict[str, Any]]) -> str:
    waited = [max(cell["waited_s"]) for cell in cells if cell["ratio"] > 1.0]
    return (
        f"{len(cells)} cells, {sum(bool(c['wrong']) for c in cells)} wrong, "
        f"{sum(c['excess_s'] > 0 for c in cells)} over their time, "
        f"{sum(c['disagreement'] > STEADY for c in cells)} unsteady, "
        f"{sum(c['runs'] > 1 for c in cells)} run again; where it took longer than recompute "
        f"alone, compute waited {1e3 * max(waited, default=0.0):.0f} ms at most (the rest is what "
        "others did to it); time to the first token over recompute alone, the worse of two "
        "requests; X: something was wrong, *: over its time, ?: recomputes differ by more than a "
        "tenth, -: no strike"
    )


def _entry(cell: dict[str, Any]) -> str:
    mark = "X" if cell["wrong"] else "*" if cell["excess_s"] > 0 else ""
    doubt = "?" if cell["disagreement"] > STEADY else ""
    return f"{cell['ratio']:.2f}{mark}{doubt}{'' if cell['strikes'] else '-'}"


def names(text: str) -> list[str]:
    """``"dram,nvme"`` as a list, for argparse."""
    return text.split(",")


def parse() -> argparse.Namespace:
    """The command line: all cells with the quick model, a few with a trained one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, default=1024)
    remote = f"also {', '.join(REMOTE)}: another process"
    parser.add_argument("--media", type=names, default=list(MEDIA), help=remote)
    parser.add_argument("--setups", type=names, default=list(SETUPS))
    parser.add_argument("--every", type=int, default=1, help="only every n-th cell")
    parser.add_argument("--skip", type=int, default=0, help="not the first so many")
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # every strike says so; the table is what is wanted
    sys.exit(start(parse(), measure, tell))

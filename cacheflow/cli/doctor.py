"""``cacheflow doctor``: what works on this machine, how fast it is, and what to fix."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from cacheflow import __version__
from cacheflow.cli.checks import Check, Verdict, checks
from cacheflow.cli.output import AsJson, figures, print_json, progress

__all__ = ["doctor", "show"]

_STYLE: Final = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.FAIL: "red"}


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", "-f", help="Folder whose disk to try (a scratch file).")
    ] = Path(),
    json: AsJson = False,
) -> None:
    """Check this machine: torch, CUDA, O_DIRECT, backends, disk and memory rates.

    Takes a few seconds. Exits with 1 when something does not work; notes do not count.
    """
    found = _run(folder.absolute())
    if json:
        print_json({"version": __version__, "checks": [asdict(check) for check in found]})
    else:
        show(found)
    if any(check.verdict is Verdict.FAIL for check in found):
        raise typer.Exit(1)


def _run(folder: Path) -> list[Check]:
    found: list[Check] = []
    todo = checks(folder)
    with progress() as bar:
        task = bar.add_task("", total=len(todo))
        for title, check in todo:
            bar.update(task, description=title)
            found += check()
            bar.advance(task)
    return found


def show(found: list[Check]) -> None:
    """Print the findings as a table."""
    table = Table(title=f"cacheflow {__version__}", title_justify="left")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in found:
        style = _STYLE[check.verdict]
        name, what, fix = (escape(text) for text in (check.name, check.found, check.fix))
        table.add_row(name, f"[{style}]{check.verdict}[/]", what, fix)
    figures().print(table)

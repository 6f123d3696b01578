"""What the subcommands share: where figures and progress go, and how a coroutine is run.

Figures go to standard output (a table, or JSON when asked), everything else to standard error, so
that ``--json`` can always be piped.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["AsJson", "figures", "human_bytes", "print_json", "progress", "run"]

T = TypeVar("T")

_WIDE: Final = 160
"""Columns of output that no terminal shows."""

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", show_default=False)
]


def figures() -> Console:
    """The console for results; made anew so that it follows a redirected standard output. In a
    file or a pipe nothing is cut to a terminal's 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDE))


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2))


class _Stages(Progress):
    """Where there is no terminal to move a bar on, each task is a line as it begins."""

    def add_task(self, description: str, *arguments: Any, **options: Any) -> TaskID:
        if self.disable:
            typer.echo(description, err=True)
        return super().add_task(description, *arguments, **options)


def progress(*, in_bytes: bool = False, in_lines: bool = False) -> Progress:
    """A progress bar on standard error that vanishes when done; when that is no terminal, silent,
    or ``in_lines``: one when a task begins, for what takes minutes."""
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    speed = [TransferSpeedColumn()] if in_bytes else []
    console = Console(stderr=True)
    return (_Stages if in_lines else Progress)(
        *columns,
        *speed,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def human_bytes(count: float) -> str:
    """``count`` bytes with a binary unit: ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def run(work: Coroutine[object, object, T]) -> T:
    """Run ``work`` on a fresh uvloop to its end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)

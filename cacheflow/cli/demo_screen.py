"""What a person sees while the demo runs: the table as it grows, and what is going on.

On a terminal everything is redrawn in place; elsewhere each step is a line. Measures nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from cacheflow.types import LayersComputed, LoadEnded, LoadOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from cacheflow.types import Event

__all__ = ["Screen", "cells_in"]

_A_SECOND: Final = 8
"""Redraws: often enough to look alive, seldom enough not to disturb what is measured."""


class Screen:
    """``quiet``: standard output is for JSON, so everything goes to standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = Console(stderr=quiet)
        self._quiet = quiet
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
            auto_refresh=False,
        )
        self._table: Table | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self.console, refresh_per_second=_A_SECOND
            )
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.freeze()

    def freeze(self) -> None:
        """Leave the table as it is; what is written from now on comes below it."""
        if self._live is not None:
            self._live.stop()
        elif self._table is not None and not self._quiet:
            self.console.print(self._table)
        self._live = self._table = None

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def write(self, text: str) -> None:
        """Text as it comes, without a new line."""
        self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """The results so far."""
        self._table = table

    @contextmanager
    def step(self, what: str, total: float) -> Iterator[Callable[[float], None]]:
        """A bar while something runs; yields what moves it on by an amount."""
        if self._live is None:
            self.note(f"... {what}")
        task = self._progress.add_task(what, total=total)
        try:
            yield lambda amount: self._progress.advance(task, amount)
        finally:
            self._progress.remove_task(task)

    def _render(self) -> Group:
        parts = [] if self._table is None else [self._table]
        return Group(*parts, self._progress)


def cells_in(event: Event, chunk_tokens: int) -> int:
    """Token-layers that became ready with ``event``."""
    match event:
        case LayersComputed():
            return event.width * len(event.layers)
        case LoadEnded(outcome=LoadOutcome.PUBLISHED):
            return event.chunks * chunk_tokens * len(event.layers)
        case _:
            return 0

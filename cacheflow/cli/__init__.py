"""The ``cacheflow`` command: mounts its subcommands and turns errors into one clean line.

Modules of subcommands import what is heavy (torch, matplotlib, a model) inside their commands, so
that ``--help`` stays instant.
"""

from __future__ import annotations

import errno
import os
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from cacheflow import __version__
from cacheflow.cli import (
    bench,
    demo,
    doctor,
    explain,
    profile,
    serve,
    simulate,
    store,
    timeline,
    top,
)
from cacheflow.environment import PREFIX, tell_unread
from cacheflow.errors import CacheFlowError
from cacheflow.settings import Settings

__all__ = ["app", "main"]


_LAST_STANDARD: Final = 2
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _CleanErrors(TyperGroup):
    """What CacheFlow raises on purpose is a message for a person: one line, exit code 2. So is a
    disk that is full."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:  # of help that is printed before any command is invoked
            raise SystemExit(_told(error)) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CacheFlowError as error:
            message = " ".join(str(error).split())
            Console(stderr=True).print(
                f"error: {message}", style="red", markup=False, soft_wrap=True
            )
            raise typer.Exit(2) from None
        except OSError as error:
            raise typer.Exit(_told(error)) from None


def _told(error: OSError) -> int:
    """Say that output cannot be written; the exit code. Raises ``error`` if it is another one."""
    if error.errno not in _FULL:
        raise error
    typer.echo(f"error: output cannot be written: {error.strerror}", err=True)
    return 2


app = typer.Typer(
    name="cacheflow",
    cls=_CleanErrors,
    help="Restores LLM KV caches by recomputing from the front while loading from the back.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("profile")(profile.profile)
app.command("serve")(serve.serve)
app.command("simulate")(simulate.simulate)
app.command("timeline")(timeline.timeline)
app.command("top")(top.top)
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cacheflow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Restores LLM KV caches by recomputing from the front while loading from the back."""
    tell_unread(PREFIX, Settings.model_fields)  # some commands read no settings


def main() -> None:
    """Entry point of the console script."""
    _hold_standard_streams()
    app()


def _hold_standard_streams() -> None:
    """Open the null device where a standard stream is closed (``<&-``): else files and sockets get
    its number, and libuv aborts the process when it is told to close one of those."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        pass
    os.close(descriptor)

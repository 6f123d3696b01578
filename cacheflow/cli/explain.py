"""``cacheflow explain``: why a prompt was, or would be, restored or not.

Looks at the tiers of the settings, or at one folder, and changes nothing in them.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer evaluates the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cacheflow.cli.output import AsJson, figures, print_json, run

if TYPE_CHECKING:
    from cacheflow.cli.explain_run import Explained

__all__ = ["explain"]

_FILE = {"exists": True, "dir_okay": False, "readable": True}


def explain(
    prompt: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Text, or JSON: token ids, messages, or a chat request with messages and tools.",
            **_FILE,
        ),
    ],
    before: Annotated[
        Path | None,
        typer.Option(help="What was sent before: names the first token that differs.", **_FILE),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model (default: SmolLM2-135M-Instruct).")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", "-f", help="This nvme folder, instead of CACHEFLOW_TIERS."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    json: AsJson = False,
) -> None:
    """Say what is stored of a prompt, where, and why the rest is not found.

    Exit code 1 when anything that could be restored would have to be recomputed.
    """
    from cacheflow.cli.explain_run import examine

    found = run(examine(prompt, before, model, folder, tenant, dtype))
    if json:
        print_json(found.document())
    else:
        _show(found)
    if found.miss is not None:
        raise typer.Exit(1)


def _show(found: Explained) -> None:
    out = figures()
    table = Table(title=f"{found.tokens} tokens, {found.chunks} whole chunks of {found.size}")
    for heading in ("tokens", *found.tiers):
        table.add_column(heading)
    for start, stop, states in found.runs():
        table.add_row(f"{start}-{stop}", *(escape(state.what) for state in states))
    if found.tokens > found.chunks * found.size:
        rest = f"{found.chunks * found.size}-{found.tokens}"
        table.add_row(rest, *("never stored: no whole chunk" for _ in found.tiers))
    out.print(table)
    for line in found.why:
        out.print(f"- {line}", markup=False)

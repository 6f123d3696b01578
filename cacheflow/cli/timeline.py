"""``cacheflow timeline``: recorded events as a Chrome trace for Perfetto, and as a picture."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer evaluates the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cacheflow.cli.output import AsJson, figures, print_json
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from cacheflow.types import Event

__all__ = ["timeline"]


def timeline(
    events: Annotated[Path, typer.Argument(help="File that an EventRecorder wrote.")],
    request: Annotated[
        list[str] | None,
        typer.Option("--request", "-r", help="Only this request (may be given again)."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace: open it at ui.perfetto.dev.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture of both pointers.")] = None,
    json: AsJson = False,
) -> None:
    """Show recorded requests: what came from where, and when.

    Without --trace or --png it lists the requests of the file.
    """
    from cacheflow.metrics.recording import read_events
    from cacheflow.metrics.timeline import Timeline

    kept = [e for e in read_events(events) if not request or _request_of(e) in request]
    if not kept:
        raise ConfigError(f"{events} has no events of {', '.join(request or ['any request'])}")
    shown = Timeline()
    for event in kept:
        shown(event)
    if trace is not None:
        shown.write_trace(trace)
    if png is not None:
        shown.write_png(png)
    rows = _rows(kept)
    if json:
        print_json(rows)
        return
    table = Table()
    for column in ("request", "policy", "outcome", "TTFT", "prompt", "by source"):
        table.add_column(column, justify="right" if column in ("TTFT", "prompt") else "left")
    for row in rows:
        sources = ", ".join(f"{name} {tokens:.0f}" for name, tokens in row["tokens"].items())
        ttft = f"{row['ttft_seconds'] * 1e3:.1f} ms"
        name, policy, outcome = row["request"], row["policy"], row["outcome"]
        table.add_row(name, policy, outcome, ttft, str(row["prompt_tokens"]), sources)
    figures().print(table)


def _request_of(event: Event) -> str:
    return str(getattr(event, "request_id", ""))


def _rows(events: list[Event]) -> list[dict[str, Any]]:
    from cacheflow.types import FirstToken

    return [
        {
            "request": event.request_id,
            "policy": event.policy,
            "outcome": event.outcome,
            "ttft_seconds": event.at - event.arrival,
            "prompt_tokens": event.prompt_tokens,
            "tokens": {name: cells / event.num_layers for name, cells in event.cells.items()},
        }
        for event in events
        if isinstance(event, FirstToken)
    ]

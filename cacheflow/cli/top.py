"""``cacheflow top``: the numbers of a running instance, live in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json
from cacheflow.cli.scrape import between, quantile, scrape

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cacheflow.cli.scrape import Page

__all__ = ["top"]


def top(
    url: Annotated[
        str, typer.Argument(help="Its metrics page, http://HOST:PORT/metrics or HOST:PORT.")
    ],
    interval: Annotated[
        float,
        typer.Option("--interval", "-i", min=0.1, max=86400.0, help="Seconds between two looks."),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, end.")] = False,
    json: AsJson = False,
) -> None:
    """Watch an instance: TTFT, busy shares, tokens by source, every tier. Ctrl-C ends it.

    Rates are of the last interval.
    """
    before = scrape(url, time.monotonic())
    if once or json:
        time.sleep(interval)
        after = scrape(url, time.monotonic())
        found = figures_of(between(before, after), after)
        print_json(found) if json else figures().print(view(found))
        return
    with Live(console=figures(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            after = scrape(url, time.monotonic())
            live.update(view(figures_of(between(before, after), after)), refresh=True)
            before = after


def figures_of(grown: Page, now: Page) -> dict[str, Any]:
    """What ``top`` shows; ``grown``: between the last two looks."""
    seconds = grown.at or 1.0
    ttft = "cacheflow_ttft_seconds"
    tokens = grown.sums("cacheflow_prompt_tokens_total", "source")
    compute = grown.sums("cacheflow_compute_busy_seconds_total", "stage")
    told = ("cacheflow_lookup_chunks_total", "cacheflow_tier_capacity_bytes")
    names = sorted({name for series in told for name in now.sums(series, "tier")})
    return {
        "requests_per_second": grown.total(f"{ttft}_count") / seconds,
        "ttft_seconds": {f"p{q}": quantile(grown, ttft, q / 100) for q in (50, 90, 99)},
        "requests": grown.sums(f"{ttft}_count", "outcome"),
        "active_restores": now.total("cacheflow_active_restores"),
        "tokens_per_second": {name: count / seconds for name, count in tokens.items() if count},
        "compute_busy": {stage: busy / seconds for stage, busy in compute.items()},
        "loop_lag_p99_seconds": quantile(grown, "cacheflow_event_loop_lag_seconds", 0.99),
        "tiers": {name: _tier(name, grown, now, seconds) for name in names},
    }


def _tier(name: str, grown: Page, now: Page, seconds: float) -> dict[str, float | None]:
    chunks = grown.sums("cacheflow_lookup_chunks_total", "result", tier=name)
    asked = sum(chunks.values())
    moved = grown.sums("cacheflow_transfer_bytes_total", "direction", tier=name)
    busy = grown.sums("cacheflow_io_busy_seconds_total", "direction", tier=name)
    return {
        "found": chunks.get("hit", 0.0) / asked if asked else None,
        "load_bytes_per_second": moved.get("load", 0.0) / seconds,
        "store_bytes_per_second": moved.get("store", 0.0) / seconds,
        "load_busy": busy.get("load", 0.0) / seconds,
        "used_bytes": now.total("cacheflow_tier_used_bytes", tier=name),
        "capacity_bytes": now.total("cacheflow_tier_capacity_bytes", tier=name),
        "evictions": grown.total("cacheflow_evictions_total", tier=name),
        "failures": grown.total("cacheflow_load_failures_total", tier=name),
        "dropped": grown.total("cacheflow_store_dropped_total", tier=name),
        "down": now.total("cacheflow_tier_down", tier=name),
    }


def view(found: dict[str, Any]) -> RenderableType:
    """The figures as tables."""
    head = Table(box=None, show_header=False)
    ttft = "  ".join(f"{name} {_ms(value)}" for name, value in found["ttft_seconds"].items())
    outcomes = "  ".join(f"{name} {count:.0f}" for name, count in found["requests"].items())
    tokens = "  ".join(f"{name} {rate:.0f}" for name, rate in found["tokens_per_second"].items())
    busy = "  ".join(f"{stage} {share:.0%}" for stage, share in found["compute_busy"].items())
    for name, value in (
        ("TTFT", ttft),
        ("requests", f"{found['requests_per_second']:.1f}/s  {outcomes}"),
        ("restoring", f"{found['active_restores']:.0f}"),
        ("tokens/s", tokens or "none"),
        ("compute busy", busy),
        ("loop lag p99", _ms(found["loop_lag_p99_seconds"])),
    ):
        head.add_row(name, value)
    tiers = Table()
    columns = ("tier", "found", "load", "busy", "store", "held", "evicted", "failed", "dropped")
    for column in (*columns, ""):
        tiers.add_column(column, justify="left" if column == "tier" else "right")
    for name, tier in found["tiers"].items():
        held = human_bytes(tier["used_bytes"])
        if tier["capacity_bytes"]:
            held += f" of {human_bytes(tier['capacity_bytes'])}"
        tiers.add_row(
            name,
            "-" if tier["found"] is None else f"{tier['found']:.0%}",
            f"{human_bytes(tier['load_bytes_per_second'])}/s",
            f"{tier['load_busy']:.0%}",
            f"{human_bytes(tier['store_bytes_per_second'])}/s",
            held,
            *(f"{tier[key]:.0f}" for key in ("evictions", "failures", "dropped")),
            "[red]set aside[/]" if tier["down"] else "",
        )
    return Group(head, tiers)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"

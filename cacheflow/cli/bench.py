"""``cacheflow bench``: how near restores come to the fluid bound, and whether they ever lose."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from cacheflow.cli.demo_report import parse_links
from cacheflow.cli.output import AsJson, figures, print_json, progress, run
from cacheflow.cli.quality import quality
from cacheflow.errors import ConfigError
from cacheflow.settings import TierSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from cacheflow.cli.bench_run import Point

__all__ = ["app"]

app = typer.Typer(help="Measure restores, or what codecs cost.", invoke_without_command=True)
app.command("quality")(quality)

_MANY_TOKENS: Final = 4096
"""From here on a round takes minutes: one fewer for every so many tokens."""


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    lengths: Annotated[
        str, typer.Option(help="Prefix lengths in tokens; multiples of 256.")
    ] = "256,512,1024,2048,4096,7936",
    links: Annotated[
        str, typer.Option(help="compute:I/O of each link, or 'raw' for the store itself.")
    ] = "raw,1:10,1:3,1:1,3:1,10:1",
    rounds: Annotated[int, typer.Option(help="Rounds a length; fewer from 4k on.", min=1)] = 3,
    threads: Annotated[int, typer.Option(help="Compute threads on a CPU.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model (default: SmolLM2-135M-Instruct).")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder for the stored KV (default: a temporary one).")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            help="Another store than a folder: backend and options as JSON, like CACHEFLOW_TIERS."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure restores on a real model and a real store: recompute, load, and both at once.

    Efficiency is the fluid bound (from recompute alone, before and after, and load alone in the
    same run) divided by what CacheFlow took. The default takes about half an hour on two cores.
    """
    if context.invoked_subcommand:
        return
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    wanted = _lengths(lengths)
    points = [(length, link) for length in wanted for link in parse_links(links)]
    with ExitStack() as stack:
        folder = store or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keeper = None if tier is None else _tier(tier)
        lag, measured = run(_bench(points, rounds, threads, dtype, model, folder, keeper))
    if as_json:
        rows = [{**point.summary(), "runs": _runs(point)} for point in measured]
        print_json({"loop_lag_p99_ms": lag * 1e3, "points": rows})
    else:
        figures().print(points_table(measured))
        figures().print(f"event-loop lag p99 during restores: {lag * 1e3:.2f} ms")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        lengths = []
    if not lengths or any(length <= 0 or length % 256 for length in lengths):
        raise ConfigError(f"--lengths {text!r}: give multiples of 256, for instance 512,4096")
    return lengths


def _tier(text: str) -> TierSettings:
    try:
        return TierSettings(**{"name": "tier", **json.loads(text)})
    except (TypeError, ValueError) as error:  # of settings and of JSON
        raise ConfigError(f"--tier {text!r}: {error}") from error


async def _bench(
    wanted: Sequence[tuple[int, Any]],
    rounds: int,
    threads: int,
    dtype: str,
    model: Path | None,
    folder: Path,
    tier: TierSettings | None,
) -> tuple[float, list[Point]]:
    from cacheflow.cli.bench_rig import SUFFIX_TOKENS, Rig, real_tokens
    from cacheflow.cli.bench_run import Bench, Point
    from cacheflow.registry import load_engine

    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    path = model or await asyncio.to_thread(factory.small_model)
    engine = await factory.open_model(path, dtype=dtype, threads=threads)
    longest = max(length for length, _ in wanted) + SUFFIX_TOKENS
    if longest > engine.max_tokens:
        raise ConfigError(f"--lengths: the model's context has {engine.max_tokens} tokens")
    tokens = await asyncio.to_thread(real_tokens, engine.tokenizer, longest)
    bench = Bench(Rig(engine, folder, tier), tokens)
    points = [Point(length, link) for length, link in wanted]
    lengths = list(dict.fromkeys(length for length, _ in wanted))
    with progress(in_lines=True) as bar:
        tiles = len(engine.grid.split(0, longest - SUFFIX_TOKENS))
        filling = bar.add_task("filling the store", total=tiles)
        await bench.fill(lambda: bar.advance(filling))
        for length in lengths:
            own = [point for point in points if point.tokens == length]
            count = max(1, rounds - length // _MANY_TOKENS)
            task = bar.add_task(f"{length} tokens", total=count * len(own))
            await bench.measure(own, count, lambda task=task: bar.advance(task))  # type: ignore[misc]
    await engine.aclose()
    return bench.lag.quantile(0.99), points


def _runs(point: Point) -> dict[str, list[float]]:
    return {
        "recompute": point.recompute,
        "load": point.load,
        "adaptive": point.adaptive,
        "fluid": point.fluid,
    }


def points_table(points: Sequence[Point]) -> Table:
    """At most 80 columns wide; ``--json`` has the rest."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = "seconds to the first token (medians)"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0)
    names = ("tokens", "link", "recomp.", "load", "both", "front", "eff.", "min-max", "gain")
    for name in (*names, "excess ms\n(allowed)"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [point.summary() for point in points]
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            row["compute_io"],
            _seconds(row["recompute_s"]),
            f"{_seconds(row['load_s'])}{'*' if row['load_is_scaled'] else ''}",
            _seconds(row["adaptive_s"]),
            f"{row['recomputed_share']:.0%}",
            f"{row['efficiency']:.2f}",
            f"{row['efficiency_min']:.2f}-{row['efficiency_max']:.2f}",
            f"{row['speedup']:.2f}",
            f"{_milliseconds(row['excess_ms'], '+')} ({_milliseconds(row['allowed_ms'])})",
        )
    steady, rounds = sum(row["steady"] for row in rows), sum(row["rounds"] for row in rows)
    drift = max(abs(row["drift"] - 1) for row in rows)
    table.caption = (
        "front: share recomputed; eff.: fluid / both, of the steady runs if there are any; gain: "
        f"better single way / both. {steady} of {rounds} runs were steady: recompute alone took "
        f"the same, to 10 %, before and after (it changed by {drift:.0%} at most)"
    )
    if any(point.load_is_scaled for point in points):
        table.caption += "; *: measured on 1,024 tokens and scaled"
    return table


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _milliseconds(value: float, sign: str = "-") -> str:
    return f"{value:{sign}.1f}" if abs(value) < 100 else f"{value:{sign}.0f}"

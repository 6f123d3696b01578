"""``cacheflow profile``: measure what recomputing and loading cost here, and keep it.

What is kept is the head start of the next process on this model, device and these tiers; it goes on
learning from what requests really take.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 - typer evaluates it
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from cacheflow.cli.output import AsJson, figures, human_bytes, print_json, progress, run
from cacheflow.errors import CacheFlowError, ConfigError
from cacheflow.settings import Settings, TierSettings

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from cacheflow.cli.profile_run import ReadRate, TileCost
    from cacheflow.costs import ChannelModel, ComputeModel

__all__ = ["profile"]

_CHUNK: Final = 256
_SIZES: Final = 3


@dataclass
class Channel:
    """What was found out about one tier; ``error`` when it cannot be used."""

    tier: TierSettings
    model: ChannelModel
    reads: list[ReadRate] = field(default_factory=list)
    error: str = ""


@dataclass
class Found:
    """All results of one run."""

    compute: ComputeModel
    tiles: list[TileCost]
    channels: list[Channel]
    path: Path
    kept: bool


def profile(
    tokens: Annotated[
        int, typer.Option(help="Measure tiles up to this position.", min=_CHUNK)
    ] = 4096,
    threads: Annotated[int, typer.Option(help="Compute threads on a CPU.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model (default: SmolLM2-135M-Instruct).")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", "-f", help="Also measure this folder, as an nvme tier 'disk'."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the engine and the tiers (CACHEFLOW_TIERS), and keep the figures for later starts.

    Computes a prompt tile by tile, and reads temporary objects of each tier at several sizes and
    depths; they are removed again. Takes about a minute on two cores.
    """
    settings = Settings()
    tiers = [*settings.tiers]
    if folder is not None:
        tiers.append(TierSettings(name="disk", backend="nvme", options={"path": str(folder)}))
    found = run(_profile(settings, tiers, tokens, threads, dtype, model))
    if json:
        print_json(_document(found))
    else:
        _show(found)
    if any(channel.error for channel in found.channels) or not found.kept:
        raise typer.Exit(1)


async def _profile(
    settings: Settings,
    tiers: list[TierSettings],
    tokens: int,
    threads: int,
    dtype: str,
    model: Path | None,
) -> Found:
    from cacheflow.costs import (
        COSTS_FILE,
        ChannelModel,
        ComputeModel,
        CostStore,
        channel_key,
        compute_key,
    )
    from cacheflow.registry import load_engine

    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    path = model or await asyncio.to_thread(factory.small_model)
    engine = await factory.open_model(path, dtype=dtype, threads=threads)
    try:
        costs = ComputeModel(*engine.layer_flops)
        channels = [Channel(tier, ChannelModel()) for tier in tiers]
        with progress(in_lines=True) as bar:
            tiles = await _compute(engine, tokens, costs, bar)
            for channel in channels:
                await _channel(channel, engine, bar)
        store = CostStore(settings.cache_dir / COSTS_FILE)
        learned = {compute_key(engine.identity, engine.grid_id): costs.profile()}
        links = {
            channel_key(c.tier.name, c.tier.backend, c.tier.options): c.model.profile()
            for c in channels
            if not c.error
        }
        kept = await asyncio.to_thread(store.save, _known(learned), _known(links))
        return Found(costs, tiles, channels, settings.cache_dir / COSTS_FILE, kept)
    finally:
        await engine.aclose()


def _known(profiles: dict[str, Any]) -> dict[str, Any]:
    return {key: profile for key, profile in profiles.items() if profile is not None}


async def _compute(engine: Any, tokens: int, costs: ComputeModel, bar: Progress) -> list[TileCost]:
    from cacheflow.cli.profile_run import measure_compute, plan_tiles

    needed = max(tile.stop for tile in plan_tiles(engine, tokens))
    if needed > engine.max_tokens:
        most = (engine.max_tokens - (needed - tokens)) // _CHUNK * _CHUNK
        raise ConfigError(
            f"--tokens {tokens}: the model's context has {engine.max_tokens} tokens; "
            f"give at most {max(most, 0)}"
        )
    task = bar.add_task(f"computing {tokens} tokens", total=len(plan_tiles(engine, tokens)))
    return await measure_compute(engine, tokens, costs, lambda: bar.advance(task))


async def _channel(channel: Channel, engine: Any, bar: Progress) -> None:
    """Measure one tier; what it fails with is its result, and the others are measured."""
    from cacheflow.cli.profile_run import DEPTHS, measure_channel
    from cacheflow.clock import SystemClock
    from cacheflow.registry import load_backend

    task = bar.add_task(f"reading tier {channel.tier.name}", total=_SIZES * len(DEPTHS))
    try:
        kind = await asyncio.to_thread(load_backend, channel.tier.backend)
        backend = await kind.open(channel.tier.options)
        try:
            channel.reads = await measure_channel(
                backend, engine.layout, channel.model, SystemClock(), lambda: bar.advance(task)
            )
        finally:
            await backend.aclose()
    except CacheFlowError as error:
        channel.error = str(error)


def _document(found: Found) -> dict[str, Any]:
    rates = found.compute.rates
    tiles = [
        {
            "start": tile.start,
            "width": tile.width,
            "layer_ms": tile.layer_seconds * 1e3,
            "tokens_per_second": tile.tokens_per_second,
        }
        for tile in found.tiles
    ]
    names = ("launch_seconds", "seconds_per_linear_flop", "seconds_per_attention_flop")
    compute = dict(zip(names, rates, strict=True)) if rates else {}
    return {
        "compute": {**compute, "tiles": tiles},
        "channels": [_channel_row(channel) for channel in found.channels],
        "file": str(found.path),
        "kept": found.kept,
    }


def _channel_row(channel: Channel) -> dict[str, Any]:
    row: dict[str, Any] = {"name": channel.tier.name, "backend": channel.tier.backend}
    if channel.error:
        return {**row, "error": channel.error}
    return {
        **row,
        "latency_ms": channel.model.latency * 1e3,
        "bytes_per_second": channel.model.bandwidth,
        "depth": channel.model.depth,
        "reads": [asdict(read) for read in channel.reads],
    }


def _show(found: Found) -> None:
    figures().print(_tile_table(found))
    for channel in found.channels:
        if channel.error:
            name = channel.tier.name
            figures().print(f"tier {name}: {channel.error}", markup=False, soft_wrap=True)
        else:
            figures().print(_read_table(channel))
    if not found.channels:
        figures().print("no tier measured: set CACHEFLOW_TIERS, or give --folder", markup=False)
    if found.kept:
        figures().print(f"kept in {found.path}", markup=False, soft_wrap=True)


def _tile_table(found: Found) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="recompute", title_justify="left", box=SIMPLE_HEAD)
    for name in ("position", "width", "ms a layer", "tokens/s", "expected ms"):
        table.add_column(name, justify="right")
    for tile in found.tiles:
        expected = _expected(found.compute, tile)
        table.add_row(
            str(tile.start),
            str(tile.width),
            f"{tile.layer_seconds * 1e3:.3f}",
            f"{tile.tokens_per_second:,.0f}",
            f"{expected * 1e3:.3f}",
        )
    launch = found.compute.rates[0] * 1e3 if found.compute.rates else 0.0
    table.caption = f"expected: by the fitted model, {launch:.3f} ms of it for launching a layer"
    return table


def _expected(model: ComputeModel, tile: TileCost) -> float:
    from cacheflow.types import Tile

    return model.layer_seconds(Tile(0, tile.start, tile.start + tile.width)) or 0.0


def _read_table(channel: Channel) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"load from tier {channel.tier.name} ({channel.tier.backend})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("size", "depth", "ms a load", "MB/s"):
        table.add_column(name, justify="right")
    for read in channel.reads:
        table.add_row(
            human_bytes(read.nbytes),
            str(read.depth),
            f"{read.load_seconds * 1e3:.2f}",
            f"{read.bytes_per_second / 1e6:,.1f}",
        )
    model = channel.model
    table.caption = (
        f"learned: latency {model.latency * 1e3:.2f} ms, "
        f"{(model.bandwidth or 0.0) / 1e6:,.1f} MB/s, depth {model.depth}"
    )
    return table

"""``cacheflow bench quality``: what storing KV with each codec costs in quality, and saves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from cacheflow.cli.output import AsJson, figures, print_json, progress, run
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from cacheflow.cli.quality_run import CodecFigures

__all__ = ["quality"]

ModelFolder: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder of a model (default: SmolLM2-135M-Instruct).")
]


def quality(
    prefix: Annotated[int, typer.Option(help="Tokens of KV that are stored.", min=1)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens predicted behind them.", min=1)] = 64,
    windows: Annotated[int, typer.Option(help="Pieces of text.", min=1)] = 4,
    threads: Annotated[int, typer.Option(help="Compute threads on a CPU.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    model: ModelFolder = None,
    json: AsJson = False,
) -> None:
    """Compare predictions over KV that went through each codec with those over the KV itself.

    Real text, fed token by token: the divergence of each next-token distribution (KL, in nats) and
    how often the likeliest token is the same one. A few minutes on one core.
    """
    found = run(_measure(prefix, tokens, windows, threads, dtype, model))
    if json:
        print_json({"codecs": [each.summary() for each in found]})
    else:
        figures().print(_table(found))


async def _measure(
    prefix: int, tokens: int, windows: int, threads: int, dtype: str, model: Path | None
) -> Sequence[CodecFigures]:
    from cacheflow.cli.bench_rig import real_tokens
    from cacheflow.cli.quality_run import compare
    from cacheflow.registry import load_engine

    factory = cast("Any", await asyncio.to_thread(load_engine, "transformers"))
    path = model or await asyncio.to_thread(factory.small_model)
    engine = await factory.open_model(path, dtype=dtype, threads=threads)
    try:
        if prefix % engine.layout.chunk_tokens or prefix + tokens > engine.max_tokens:
            raise ConfigError(
                f"--prefix {prefix}: give a multiple of {engine.layout.chunk_tokens} that fits "
                f"the model's context of {engine.max_tokens} tokens"
            )
        whole = prefix + tokens
        text = await asyncio.to_thread(real_tokens, engine.tokenizer, windows * whole)
        pieces = [text[at : at + whole] for at in range(0, windows * whole, whole)]
        with progress() as bar:
            task = bar.add_task("predicting", total=windows * tokens)
            return await compare(engine, pieces, prefix, lambda: bar.advance(task))
    finally:
        await engine.aclose()


def _table(found: Sequence[CodecFigures]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="KV stored with each codec", box=SIMPLE_HEAD)
    names = ("codec", "ratio", "encode MB/s", "decode MB/s", "KL mean", "KL p99", "same token")
    for name in names:
        table.add_column(name, justify="left" if name == "codec" else "right", no_wrap=True)
    for row in (each.summary() for each in found):
        table.add_row(
            row["codec"],
            f"{row['ratio']:.2f}",
            f"{row['encode_bytes_per_second'] / 1e6:.0f}",
            f"{row['decode_bytes_per_second'] / 1e6:.0f}",
            f"{row['kl_mean']:.2e}",
            f"{row['kl_p99']:.2e}",
            f"{row['same_token']:.2%}",
        )
    table.caption = f"{found[0].predictions} predictions; ratio and rates in bytes of raw KV"
    return table

"""Engines for the benchmarks of restores: the trained small model, or a quick random one.

Knows no figures: it parses the options that these benchmarks share and opens what they name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import uvloop
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheflow.cli.bench_rig import Prompt, Rig, real_tokens
from cacheflow.cli.output import figures
from cacheflow.errors import CacheFlowError
from cacheflow.scheduling import load_policy
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.simulation import FluidRequest
from cacheflow.types import LayersComputed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
    from contextlib import AsyncExitStack

    from rich.progress import Progress

    from cacheflow.cli.bench_rig import Run
    from cacheflow.restore import Restorer
    from cacheflow.scheduling import Policy
    from cacheflow.types import Event

__all__ = [
    "LayerTime",
    "Patient",
    "balanced",
    "costs_of",
    "fair",
    "fill",
    "layer_times",
    "model_folder",
    "model_name",
    "model_options",
    "numbers",
    "opened",
    "policy_of",
    "prompts_of",
    "random_prompt",
    "ratio",
    "recomputed",
    "show",
    "slowdown",
    "spread",
    "start",
]

FAIR = 10.0
"""Medians within which every session has its first token, however many there are."""
QUICK_MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
"""With 8 layers about a twelfth of the trained model's work a token, half its attention."""


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options that name the engine and the form of the figures."""
    quick = "random weights, layers of width 256, and shorter prompts: minutes, not an hour"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--layers", type=int, default=8, help="of the quick model (8)")
    parser.add_argument("--model", help="a folder with a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--store", help="folder for the stored KV (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="figures as JSON, every run in it")


def load_options(doc: str | None, sessions: int) -> argparse.Namespace:
    """The command line of a bench that keeps ``sessions`` conversations going for a time."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--sessions", type=int, default=sessions)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """``"512,1024"`` as integers, for argparse."""
    return [int(part) for part in text.split(",") if part]


def ratio(text: str) -> float:
    """``"1:3"`` (recompute time to load time) as a number, for argparse."""
    compute, _, load = text.partition(":")
    return float(compute) / float(load)


@contextlib.asynccontextmanager
async def opened(options: argparse.Namespace) -> AsyncIterator[Rig]:
    """The engine that ``options`` ask for in float32, with an empty store; closed at the end."""
    from cacheflow.plugins.transformers import TransformersEngine

    with tempfile.TemporaryDirectory() as scratch:
        model = await asyncio.to_thread(model_folder, options, Path(scratch))
        engine = await TransformersEngine.open_model(
            model, dtype="float32", threads=options.threads
        )
        rig = Rig(engine, Path(options.store or scratch) / "kv")
        try:
            yield rig
        finally:
            await rig.aclose()


def model_folder(options: argparse.Namespace, scratch: Path) -> Path:
    """Where the model lies that ``options`` ask for; a random one is made in ``scratch``."""
    from cacheflow.plugins.transformers import prepare_smollm2

    if options.model:
        return Path(options.model)
    return _random_llama(scratch / "model", options.layers) if options.quick else prepare_smollm2()


def _random_llama(folder: Path, layers: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(**{**QUICK_MODEL, "num_hidden_layers": layers})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def prompts_of(rig: Rig, lengths: Sequence[int], suffix: int) -> list[Prompt]:
    """A prompt a length, each with contents of its own, and ``suffix`` tokens behind the prefix."""
    total = sum(lengths) + suffix * len(lengths)
    tokens = await asyncio.to_thread(_tokens, rig.engine, total)
    prompts, at = [], 0
    for length in lengths:
        prompts.append(rig.prompt(tokens[at : at + length + suffix], suffix))
        at += length + suffix
    return prompts


def _tokens(engine: Any, count: int) -> list[int]:
    if engine.tokenizer is not None:
        return real_tokens(engine.tokenizer, count)
    chance = random.Random(count)
    return [chance.randrange(QUICK_MODEL["vocab_size"]) for _ in range(count)]


class Patient(Adaptive):
    """``adaptive`` in all but one thing: the suffix waits until the whole prefix is there."""

    name: ClassVar[str] = "patient"
    overlaps: ClassVar[bool] = False


def policy_of(name: str) -> Policy:
    """A policy of the scheduler, or the variant made for benchmarks."""
    return Patient() if name == Patient.name else load_policy(name)


async def fill(rig: Rig, prompts: Sequence[Prompt], bar: Progress) -> None:
    """Store every prefix, with a bar of its own."""
    tiles = sum(len(rig.engine.grid.split(0, prompt.prefix)) for prompt in prompts)
    task = bar.add_task("filling the store", total=tiles)
    await rig.fill(prompts, lambda: bar.advance(task))


async def recomputed(rig: Rig, prompt: Prompt, stack: AsyncExitStack) -> tuple[Restorer, Run]:
    """A restorer without channels, open as long as ``stack``, and a recompute with it."""
    alone = await stack.enter_async_context(rig.restorer({}))
    return alone, await rig.together(alone, [prompt], "recompute")


def balanced(rig: Rig, prompt: Prompt, recompute: Run, compute_io: float) -> float:
    """Bandwidth at which loading takes ``1 / compute_io`` of what ``recompute`` took."""
    return rig.nbytes(prompt.prefix) * compute_io / recompute.restorations[0].restored_seconds


def random_prompt(chance: random.Random, tokens: int) -> list[int]:
    """Of a random model, of whose vocabulary it takes a part."""
    return [chance.randrange(320) for _ in range(tokens)]


def model_name(options: argparse.Namespace) -> str:
    """What the figures say of the model."""
    return options.model or (f"random, {options.layers} x 256" if options.quick else "SmolLM2-135M")


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds that one layer of one tile (by its index on the grid) took on the compute stream."""

    tile: int
    layer: int
    width: int
    is_suffix: bool
    seconds: float


def layer_times(events: Iterable[Event], request_id: str) -> list[LayerTime]:
    """What compute did for one request in these events, in order."""
    times = []
    for event in events:
        if isinstance(event, LayersComputed) and event.request_id == request_id:
            ends = pairwise((*event.starts, event.stop))
            for layer, (begin, stop) in zip(event.layers, ends, strict=True):
                width, suffix = event.width, event.is_suffix
                times.append(LayerTime(event.tile, layer, width, suffix, stop - begin))
    return times


def costs_of(rig: Rig, run: Run, bandwidth: float) -> list[FluidRequest]:
    """Each request of ``run`` (recompute alone) by either way, over a link of ``bandwidth``."""
    layout = rig.engine.layout
    token_seconds = layout.layer_stride() / layout.chunk_tokens / bandwidth
    costs = []
    for name in run.ids:
        times = layer_times(run.events, name)
        prefix = [time for time in times if not time.is_suffix]
        costs.append(
            FluidRequest(
                compute=tuple(time.seconds for time in prefix),
                load=tuple(time.width * token_seconds for time in prefix),
                fixed=sum(time.seconds for time in times if time.is_suffix),
            )
        )
    return costs


def slowdown(pairs: Iterable[tuple[Sequence[LayerTime], Sequence[LayerTime]]]) -> float:
    """Seconds that compute took for its cells by those of the same cells by recompute alone.

    ``pairs``: a request's times in the run looked at, and alone. 1 where nothing was computed.
    What is above 1 is not the scheduler's doing: loads, or other programs, were in compute's way.
    """
    spent = expected = 0.0
    for mine, alone in pairs:
        known = {(time.tile, time.layer): time.seconds for time in alone if not time.is_suffix}
        for time in mine:
            if not time.is_suffix:
                spent += time.seconds
                expected += known[time.tile, time.layer]
    return spent / expected if expected else 1.0


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """One table on standard output."""
    table = Table(title=title, box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    figures().print(table)


def fair(slowest: float) -> str:
    """Whether the slowest first token, in medians of all, came within the bound."""
    return f"{slowest:.1f} (bound {FAIR:g}: {'kept' if slowest <= FAIR else 'BROKEN'})"


def start(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Awaitable[dict[str, Any]]],
    tell: Callable[[dict[str, Any]], None],
) -> int:
    """Measure on a fresh loop and print the figures; the exit status."""
    # As ``cacheflow bench`` does: spinning OpenMP threads would take the core that I/O needs.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")

    async def work() -> dict[str, Any]:
        return await measure(options)

    try:
        found = uvloop.run(work())
    except CacheFlowError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        tell(found)
    return 0

"""The next turn of a conversation whose KV was forgotten meanwhile, on a real engine.

A turn ends somewhere in a tile. Its KV is stored; the next one comes with some new tokens and is
restored over an nvme tier behind a link of limited bandwidth: recomputed, loaded, and both at once;
and both at once where the tile in which the history ends is computed anew as a whole, as it was
before its stored piece was loaded. Interleaved, in random order.

    make bench-turns ARGS="--quick"
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from placement_real import balanced_bandwidth, shared_link
from rich.console import Console
from rich.progress import track
from rigs import model_name, model_options, numbers, opened, random_prompt, ratio, show, start

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.types import TileGrid

WAYS: Final = ("recompute", "load", "adaptive", "tile anew")


def _whole(
    stored: int, usable: int, grid: TileGrid, size: int, is_strange: Callable[[range], bool]
) -> int:
    """The tile in which the stored chunks end, as a whole."""
    last = grid.tile(grid.index_at(stored * size - 1)).stop if stored else 0
    return min(usable, last // size)


def _as_it_was(way: str) -> AbstractContextManager[object]:
    if way != "tile anew":
        return nullcontext()
    return patch("cacheflow.restore.lookups.restorable", _whole)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """TTFT of the next turn in seconds, by link, history and way."""
    chance = random.Random(options.seed)
    found = []
    async with opened(options) as rig:
        longest = random_prompt(chance, max(options.histories) + options.new)
        bandwidth = await balanced_bandwidth(rig, longest)
        settings = list(product(options.ratios, options.histories))
        for (name, share), history in track(settings, "turns", console=Console(stderr=True)):
            found.append(
                {
                    "link": name,
                    "history": history,
                    "stored": (history - 1) // rig.engine.layout.chunk_tokens,
                    "ttft": await _turns(rig, options, history, bandwidth * share, chance),
                }
            )
        size = rig.engine.layout.chunk_tokens
    return {"model": model_name(options), "new": options.new, "chunk": size, "turns": found}


async def _turns(
    rig: Rig, options: argparse.Namespace, history: int, bandwidth: float, chance: random.Random
) -> dict[str, list[float]]:
    """By way. Every turn is of a conversation of its own; the first round warms up."""
    ttft: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        kept = Settings(tiers=(shared_link(folder, bandwidth),), keep_costs=False)
        async with CacheFlow.open(kept, engine=rig.engine) as flow:
            for number in range(options.rounds + 1):
                for way in chance.sample(WAYS, len(WAYS)):
                    session, prompt = flow.session(), random_prompt(chance, history + options.new)
                    async for _ in session.generate(prompt[:history], max_new_tokens=1):
                        pass
                    await flow.flush()
                    await session.forget()
                    report = Generation()
                    policy = "adaptive" if way == "tile anew" else way
                    with _as_it_was(way):
                        async for _ in session.generate(
                            prompt, max_new_tokens=1, policy=policy, save=False, report=report
                        ):
                            pass
                    await session.forget()
                    if number and report.ttft_seconds is not None:
                        ttft[way].append(report.ttft_seconds)
    return ttft


def tell(found: dict[str, Any]) -> None:
    """One table."""
    rows = []
    for turn in found["turns"]:
        mean = {way: statistics.mean(seconds) for way, seconds in turn["ttft"].items()}
        rows.append(
            [
                turn["link"],
                f"{turn['history']:,}",
                f"{turn['stored'] * found['chunk']:,}",
                *(f"{1e3 * mean[way]:.0f}" for way in WAYS),
                f"{mean['adaptive'] / min(mean['recompute'], mean['load']):.2f}",
                f"{100 * (mean['adaptive'] / mean['tile anew'] - 1):+.0f} %",
            ]
        )
    heads = ["compute:I/O", "history", "stored", *WAYS, "of the better", "of tile anew"]
    rounds = len(found["turns"][0]["ttft"]["load"])
    caption = (
        f"{found['model']}, {found['new']} new tokens, mean of {rounds} turns each; "
        "of the better: adaptive / min(recompute, load)"
    )
    show("TTFT in ms of the next turn of a forgotten conversation", heads, rows, caption)


def _ratios(text: str) -> list[tuple[str, float]]:
    return [(part, ratio(part)) for part in text.split(",")]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--histories", type=numbers, default=[1400, 3600, 5900], help="tokens")
    parser.add_argument("--new", type=int, default=300, help="tokens of the next turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    help_ = "compute:I/O of the link (default: 1:3,1:1,3:1)"
    parser.add_argument("--ratios", type=_ratios, default=_ratios("1:3,1:1,3:1"), help=help_)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(start(parse(), measure, tell))

"""Promise 1 on the trained model: restored KV against cold KV, byte for byte.

Forces the two pointers to meet at chosen layers of every tile (by storing exactly the cells behind
the meeting point), then restores with random holes. Prints how many bytes differ (must be none)
and whether the greedy continuations are the same.

    make bench-exact
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress

from cacheflow.cli.bench_rig import real_tokens
from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.memory import StagingPool
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.storage import MemoryBackend
from cacheflow.testing.vault import Vault
from cacheflow.types import Span

NEW_TOKENS = 8


@dataclass
class Outcome:
    """Sums over all restores of one dtype."""

    dtype: str
    restores: int = 0
    differing_bytes: int = 0
    compared_bytes: int = 0
    other_tokens: int = 0


class Exact:
    """A cold run kept aside, and restores compared with it."""

    def __init__(self, engine: Any, tokens: list[int], outcome: Outcome) -> None:
        self.engine = engine
        self.tokens = tokens
        self.outcome = outcome
        self.chunk = engine.layout.chunk_tokens
        self.prefix = (len(tokens) - 1) // self.chunk * self.chunk

    async def cold(self) -> None:
        """Prefill on the grid, keep KV and continuation."""
        await self.engine.open("cold", self.tokens)
        await self.engine.prefill("cold")
        self.vault = await Vault.take(self.engine, "cold", self.tokens)
        self.greedy = await self.continuation("cold")
        await self.engine.close("cold")

    async def continuation(self, name: str) -> list[int]:
        tokens = [await self.engine.first_token(name)]
        for _ in range(NEW_TOKENS - 1):
            tokens += await self.engine.decode([name], tokens[-1:])
        return tokens

    async def restore(self, store: MemoryBackend, policy: str = "load") -> None:
        """One restore, compared."""
        await self.engine.open("warm", self.tokens)
        pool = StagingPool(256 << 20)
        scheduler = BatchScheduler(ComputeModel(*self.engine.layer_flops), SystemClock())
        async with Restorer(self.engine, scheduler, {"store": store}, pool) as restorer:
            request = RestoreRequest("warm", self.tokens, self.vault.keys, 0.0)
            await restorer.run(request, load_policy(policy))
        again = await Vault.take(self.engine, "warm", self.tokens)
        chunks = self.prefix // self.chunk
        self.outcome.restores += 1
        self.outcome.compared_bytes += sum(len(p) for p in self.vault.payloads[:chunks])
        self.outcome.differing_bytes += self.vault.differing_bytes(again, chunks)
        self.outcome.other_tokens += await self.continuation("warm") != self.greedy
        await self.engine.close("warm")

    async def meet_at(self, tile: Any, layer: int) -> None:
        """Recompute everything before layer ``layer`` of ``tile``, load the rest."""
        store = MemoryBackend()
        layers = self.engine.layout.num_layers
        for chunk in range(tile.start // self.chunk, self.prefix // self.chunk):
            inside = chunk < tile.stop // self.chunk
            if not inside or layer < layers:
                await self.vault.put(store, chunk, Span(layer if inside else 0, layers))
        await self.restore(store)

    async def with_holes(self, chance: random.Random) -> None:
        """Drop each of two layer shards of each chunk with a chance of 0.3."""
        store, layers = MemoryBackend(), self.engine.layout.num_layers
        for chunk in range(self.prefix // self.chunk):
            cut = chance.randrange(1, layers)
            for span in (Span(0, cut), Span(cut, layers)):
                if chance.random() < 0.7:
                    await self.vault.put(store, chunk, span)
        await self.restore(store, chance.choice(("load", "adaptive")))


async def campaign(options: argparse.Namespace, dtype: str, tokens: int, bar: Progress) -> Outcome:
    """All meeting points and holes in one dtype."""
    from cacheflow.plugins.transformers import TransformersEngine, prepare_smollm2

    model = Path(options.model) if options.model else await asyncio.to_thread(prepare_smollm2)
    engine = await TransformersEngine.open_model(model, dtype=dtype, threads=options.threads)
    ids = await asyncio.to_thread(real_tokens, engine.tokenizer, tokens + 5)
    if engine.grid.tile(engine.grid.index_at(tokens - 1)).stop != tokens:
        raise SystemExit(f"{tokens} tokens do not end with a tile: only whole ones are exact")
    outcome = Outcome(dtype)
    exact = Exact(engine, ids, outcome)
    chance = random.Random(1)
    step = options.step if dtype == "float32" else options.slow_step
    tiles = engine.grid.split(0, exact.prefix)
    points = [(t, n) for t in tiles for n in range(0, engine.layout.num_layers + 1, step)]
    task = bar.add_task(f"{dtype}, {tokens} tokens", total=len(points) + options.holes)
    await exact.cold()
    for tile, layer in points:
        await exact.meet_at(tile, layer)
        bar.advance(task)
    for _ in range(options.holes):
        await exact.with_holes(chance)
        bar.advance(task)
    await engine.aclose()
    return outcome


async def main(options: argparse.Namespace) -> int:
    """Run both dtypes and print."""
    with Progress(console=Console(stderr=True)) as bar:
        outcomes = [
            await campaign(options, "float32", options.tokens, bar),
            await campaign(options, "bfloat16", options.slow_tokens, bar),
        ]
    if options.json:
        print(json.dumps([vars(outcome) for outcome in outcomes]))
    else:
        for o in outcomes:
            same = "yes" if o.other_tokens == 0 else f"no ({o.other_tokens} restores)"
            print(
                f"{o.dtype:>9}: {o.restores} restores, {o.differing_bytes} of "
                f"{o.compared_bytes:,} bytes differ, greedy tokens identical: {same}"
            )
    return int(any(o.differing_bytes or o.other_tokens for o in outcomes))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="prefix in float32")
    parser.add_argument("--slow-tokens", type=int, default=512, help="prefix in bfloat16")
    parser.add_argument("--step", type=int, default=1, help="every n-th layer in float32")
    parser.add_argument("--slow-step", type=int, default=5, help="every n-th layer in bfloat16")
    parser.add_argument("--holes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", help="a folder with a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(uvloop.run(main(parse())))

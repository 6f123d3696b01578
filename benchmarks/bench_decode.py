"""Why the KV cache is made of tile pages: batched decode over a shared prefix, three layouts.

One layer's attention in a decode step, SmolLM2 shape, float32, one thread: every request has a
shared prefix of 2,048 tokens and 256 of its own.

* ``shared``: tile pages, held once, all requests that hold a page meet it in one call (ours);
* ``private``: the same pages, each request by itself;
* ``gather``: blocks of 16 or 256 tokens, gathered by a block table into one tensor each step.

    make bench-decode
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

import torch

from cacheflow.plugins.transformers.attention import (
    RowBlock,
    Rows,
    attention_forward,
    current_reach,
)
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEADS, KV_HEADS, DIM = 9, 3, 64
PREFIX, OWN = 2048, 256


class Case:
    """K and V of ``batch`` requests over one prefix, and one query each."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.query = torch.randn(batch, HEADS, 1, DIM)
        self.prefix = torch.randn(2, 1, KV_HEADS, PREFIX, DIM)
        self.own = [torch.randn(2, 1, KV_HEADS, OWN, DIM) for _ in range(batch)]
        tiles = TileGrid().split(0, PREFIX)
        self.pages = [self.prefix[:, :, :, tile.start : tile.stop] for tile in tiles]

    def shared(self) -> torch.Tensor:
        every = slice(0, self.batch)
        blocks = [RowBlock(every, page[0], page[1]) for page in self.pages]
        blocks += [RowBlock(slice(i, i + 1), kv[0], kv[1]) for i, kv in enumerate(self.own)]
        return self._attend(self.query, blocks)

    def private(self) -> torch.Tensor:
        made = []
        for i, own in enumerate(self.own):
            blocks = [RowBlock(slice(0, 1), page[0], page[1]) for page in (*self.pages, own)]
            made.append(self._attend(self.query[i : i + 1], blocks))
        return torch.cat(made)

    def gather(self, block: int) -> Callable[[], torch.Tensor]:
        shared, own = PREFIX // block, OWN // block
        store = torch.cat([self.prefix, *self.own], dim=3).squeeze(1)
        store = store.view(2, KV_HEADS, -1, block, DIM).transpose(1, 2).contiguous()
        table = torch.tensor(
            [
                [*range(shared), *range(shared + i * own, shared + (i + 1) * own)]
                for i in range(self.batch)
            ]
        )

        def step() -> torch.Tensor:
            kv = store[:, table].transpose(2, 3).reshape(2, self.batch, KV_HEADS, -1, DIM)
            folded = self.query.view(self.batch, KV_HEADS, -1, DIM)
            out = torch.nn.functional.scaled_dot_product_attention(folded, kv[0], kv[1])
            return out.reshape(self.batch, 1, HEADS, DIM)

        return step

    def _attend(self, query: torch.Tensor, blocks: Sequence[RowBlock]) -> torch.Tensor:
        current_reach.reach = Rows(blocks)
        unused = query[:, :KV_HEADS]
        return attention_forward(torch.nn.Identity(), query, unused, unused, None)[0]


def best(step: Callable[[], torch.Tensor], expected: torch.Tensor, rounds: int) -> float:
    """Seconds of the fastest of ``rounds`` steps, after one whose result is checked."""
    torch.testing.assert_close(step(), expected, atol=1e-4, rtol=1e-4)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print milliseconds a step for each layout."""
    parser = argparse.ArgumentParser(description="Batched decode over a shared prefix")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = []
    with torch.inference_mode():
        for batch in args.batches:
            case = Case(batch)
            expected = case.private()
            ways = {
                "shared": case.shared,
                "private": case.private,
                "gather16": case.gather(16),
                "gather256": case.gather(256),
            }
            row = {name: best(way, expected, args.rounds) * 1e3 for name, way in ways.items()}
            figures.append({"batch": batch, **row})
            if not args.json:
                print(
                    f"{batch:3} requests: " + "  ".join(f"{k} {v:.2f} ms" for k, v in row.items())
                )
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

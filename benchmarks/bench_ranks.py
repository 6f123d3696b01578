"""Tensor-parallel ranks in virtual time: what agreeing costs, and what the slowest link costs.

    make bench-ranks                         1 to 64 ranks
    make bench-ranks ARGS="--json"

The real schedulers and the real agreement, modelled compute and links. Every rank has a link of its
own that loads its heads; compute is that of all ranks together. "Alike": every link loads alone as
long as recompute alone takes. "Uneven": their speeds are log-normal (sigma 0.35), and all wait for
the slowest. The bound is fluid, for the slowest link, and knows of no exchanges. A restore has
tiles x layers cells; an exchange of votes takes 0.2 ms here (gloo between two processes of one
host: 0.5 ms while others kept its two cores busy).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from typing import TYPE_CHECKING, Any, Final

from cacheflow.costs import fluid_seconds
from cacheflow.testing.virtual import Link, make_spec
from cacheflow.testing.virtual_ranks import VirtualRanks
from cacheflow.types import Coverage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import Tile

LAYERS: Final = 32
STRIDE: Final = 1 << 20
LINEAR, ATTENTION = 1e-4, 1e-9
"""Seconds a token: 8,192 tokens take about 0.85 s."""
EXCHANGE_SECONDS: Final = 2e-4
RANKS: Final = (1, 2, 4, 8, 16, 32, 64)


def layer_seconds(tile: Tile) -> float:
    """Of all ranks together."""
    return tile.width * (LINEAR + ATTENTION * (tile.start + tile.width / 2)) / LAYERS


def restore(speeds: Sequence[float], tokens: int) -> dict[str, Any]:
    """A warm restore; ``speeds``: of each rank's link, 1.0 is as fast as recompute."""
    spec = make_spec(tokens, tokens + 1, layers=LAYERS)
    alone = sum(layer_seconds(tile) for tile in spec.tiles) * LAYERS
    total = STRIDE * LAYERS * tokens // 256
    play = VirtualRanks(
        [{"link": Link(total * speed / alone, 1e-4)} for speed in speeds],
        layer_seconds,
        linear=LINEAR,
        attention=ATTENTION,
        exchange_seconds=EXCHANGE_SECONDS,
    )
    found = Coverage("link", ((1 << LAYERS) - 1,) * (tokens // 256), STRIDE)
    began = 0.0
    for name in ("warm-up", "measured"):
        play.settle()
        play.exchanges, began = 0, play.clock.now()
        spec = make_spec(tokens, tokens + 1, layers=LAYERS, request_id=name, arrival=began)
        play.arrive(spec, [[found] for _ in speeds])
        play.run()
    assert all(rank.computed == play.ranks[0].computed for rank in play.ranks)
    cells = [tile for tile in spec.tiles for _ in range(LAYERS)]
    loads = [alone * tile.width / (tokens * LAYERS * min(speeds)) for tile in cells]
    return {
        "seconds": max(rank.restored_at["measured"] for rank in play.ranks) - began,
        "bound": fluid_seconds([layer_seconds(tile) for tile in cells], loads),
        "exchanges": play.exchanges,
        "cells": len(spec.tiles) * LAYERS,
    }


def measure(tokens: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of ranks."""
    chance, rows = random.Random(1), []
    for count in ranks:
        uneven = [math.exp(chance.gauss(0.0, 0.35)) for _ in range(count)]
        alike, mixed = restore([1.0] * count, tokens), restore(uneven, tokens)
        rows.append(
            {
                "ranks": count,
                "seconds": alike["seconds"],
                "of_bound": alike["bound"] / alike["seconds"],
                "exchanges": alike["exchanges"],
                "cells": alike["cells"],
                "uneven_seconds": mixed["seconds"],
                "uneven_of_bound": mixed["bound"] / mixed["seconds"],
            }
        )
    return rows


def main() -> None:
    """Print one line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    options = parser.parse_args()
    rows = measure(options.tokens, options.ranks)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("ranks   alike s  of bound   exchanges / cells   uneven s  of bound")
    for row in rows:
        print(
            f"{row['ranks']:5}   {row['seconds']:7.4f}  {row['of_bound']:8.3f}   "
            f"{row['exchanges']:9} / {row['cells']:5}   {row['uneven_seconds']:8.4f}  "
            f"{row['uneven_of_bound']:8.3f}"
        )


if __name__ == "__main__":
    main()

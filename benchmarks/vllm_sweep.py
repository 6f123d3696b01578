"""Seconds to the first token: recompute, load everything, CacheFlow, at many store speeds.

One engine answers prompts with one long stored prefix, each with an end of its own; a request says
which of the three it wants, so the runs of a pair come right after one another, each pair in
another order. The store takes its loads one after the other, so many milliseconds a block.
"""

from __future__ import annotations

import random
import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from vllm_engine import BLOCK, VOCABULARY, Engine, quick_llama

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["add_arguments", "report", "run"]

POLICIES: Final = ("recompute", "load", "adaptive")
DELAYS: Final = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
"""Milliseconds a block."""
FEW: Final = 3
"""Runs of what takes several times as long as the better way: it is not what is compared with."""
GOAL: Final = 0.70
"""Of the better way, at balance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes."""
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stored prefix")
    parser.add_argument("--suffix", type=int, default=64, help="tokens behind it")
    parser.add_argument("--no-overlap", action="store_true", help="setting overlap=false")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--chunk", type=int, help="tokens a step (default: the whole prompt)")
    parser.add_argument("--delays", type=float, nargs="*", default=list(DELAYS), metavar="MS")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All delays, and the one at which loading takes as long as computing."""
    if options.quick:
        options.tokens, options.pairs, options.delays = 1024, 3, [0.0]
    blocks = options.tokens // BLOCK
    chance = random.Random(1)
    prefix = chance.choices(range(VOCABULARY), k=blocks * BLOCK)
    prompts = iter(lambda: prefix + chance.choices(range(VOCABULARY), k=options.suffix), [])
    longest = len(prefix) + options.suffix + BLOCK
    engine_options = {
        "dtype": options.dtype,
        "max_model_len": longest,
        "max_num_batched_tokens": options.chunk or longest,
        "max_num_seqs": 4,
    }
    extra = {"overlap": not options.no_overlap}
    model = options.model or quick_llama(folder)
    with Engine.start(folder, model, extra=extra, **engine_options) as engine:
        alone = _fill(engine, prompts, blocks)
        balance = 1000 * alone / blocks
        progress = sys.stderr if options.json else sys.stdout
        heads = "".join(f"{name:>12}" for name in POLICIES)
        print(f"{blocks} stored blocks; at balance {balance:.1f} ms a block", file=progress)
        print(f"{'ms/block':>9}{heads}{'ratio':>10}", file=progress)
        rows = []
        for delay in sorted([*options.delays, balance]):
            rows.append(_at(engine, prompts, delay, options.pairs))
            _show(rows[-1], progress)
        overlaps = engine.metric("vllm:cacheflow_overlaps", result="complete")
    return {"balance_ms": round(balance, 2), "rows": rows, "overlaps": overlaps}


def report(result: dict[str, Any]) -> list[str]:
    """The verdicts."""
    rows = result["rows"]
    within = sum(row["within"] for row in rows)
    balanced = next(row for row in rows if row["delay_ms"] == result["balance_ms"])
    return [
        (
            f"within 5 % or 15 ms of the better way at {within} of {len(rows)} delays: "
            f"{_verdict(within == len(rows))}"
        ),
        (
            f"{balanced['ratio']:.2f} of the better way at balance (goal {GOAL}): "
            f"{_verdict(balanced['ratio'] <= GOAL)}"
        ),
        f"{result['overlaps']:.0f} prompts were begun under their last loads",
    ]


def _fill(engine: Engine, prompts: Iterator[list[int]], blocks: int) -> float:
    """Store the prefix; what recompute takes, the median of a few runs."""
    engine.steer()
    engine.have_stored(prompts, blocks * BLOCK)
    return statistics.median(engine.first_token(next(prompts), "recompute") for _ in range(3))


def _at(engine: Engine, prompts: Iterator[list[int]], delay: float, pairs: int) -> dict[str, Any]:
    """All pairs at ``delay`` milliseconds a block."""
    engine.steer(seconds=delay / 1000)
    engine.first_token(next(prompts), "adaptive")  # learns the new speed
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for pair in range(pairs):
        turn = pair % len(POLICIES)
        for policy in POLICIES[turn:] + POLICIES[:turn]:
            if policy == "load" and pair >= FEW and _hopeless(times):
                continue
            times[policy].append(engine.first_token(next(prompts), policy))
    return _summary(delay, times)


def _hopeless(times: dict[str, list[float]]) -> bool:
    return min(times["load"]) > 2 * max(times["recompute"])


def _summary(delay: float, times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {policy: statistics.median(values) for policy, values in times.items()}
    best = min(medians["recompute"], medians["load"])
    return {
        "delay_ms": round(delay, 2),
        "pairs": len(times["adaptive"]),
        **{f"{policy}_s": round(seconds, 4) for policy, seconds in medians.items()},
        "ratio": round(medians["adaptive"] / best, 3),
        "within": medians["adaptive"] <= best + max(0.05 * best, 0.015),
    }


def _verdict(kept: bool) -> str:
    return "yes" if kept else "NO"


def _show(row: dict[str, Any], out: Any) -> None:
    mark = "" if row["within"] else "  <- worse than the better one"
    cells = "".join(f"{row[f'{policy}_s']:12.3f}" for policy in POLICIES)
    print(f"{row['delay_ms']:9.1f}{cells}{row['ratio']:10.2f}{mark}", file=out, flush=True)

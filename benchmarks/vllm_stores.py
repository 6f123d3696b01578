"""What stores cost a restore in vLLM that goes on beside them, on one line to the store.

A new prompt is computed, and while its blocks are being stored another one of the same length,
whose blocks are stored, comes back: just then (beside), or once all stores have ended (alone). Load
takes as long as recompute, and stores take as long as loads, on the same line. In turn.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from vllm_engine import BLOCK, VOCABULARY, Engine, quick_llama

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["add_arguments", "report", "run"]

WAYS: Final = ("alone", "beside")
QUIET: Final = 1.0
"""Seconds without a store after which there are no more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes."""
    parser.add_argument("--stored", type=int, default=4096, help="tokens of both prompts")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds to the first token of what comes back."""
    if options.quick:
        options.stored, options.rounds = 1024, 2
    chance, tokens = random.Random(5), options.stored + 64
    model = options.model or quick_llama(folder)

    def drawn() -> list[int]:
        return chance.choices(range(VOCABULARY), k=tokens)

    longest = tokens + BLOCK
    engine_options = {
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
    }
    kept, seconds = drawn(), dict[str, list[float]]()
    with Engine.start(folder, model, **engine_options) as engine:
        engine.steer()
        engine.have_stored(iter(lambda: kept, []), options.stored)
        alone = statistics.median(engine.first_token(drawn(), "recompute") for _ in range(3))
        settle(engine)
        engine.steer(seconds=alone / (options.stored // BLOCK), shared=1)
        engine.first_token(kept, "adaptive")  # learns the new speed
        for number in range(options.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                seconds.setdefault(way, []).append(_beside(engine, way, drawn, kept))
                settle(engine)
        dropped = engine.metric("vllm:cacheflow_store_dropped")
    return {
        "recompute_s": round(alone, 3),
        **{f"{way}_s": [round(each, 3) for each in seconds[way]] for way in WAYS},
        "ratio": round(_median(seconds, "beside") / _median(seconds, "alone"), 3),
        "dropped": dropped,
    }


def report(result: dict[str, Any]) -> list[str]:
    """The figures in a sentence."""
    alone, beside = (statistics.median(result[f"{way}_s"]) for way in WAYS)
    return [
        f"recompute {result['recompute_s']} s",
        f"restored alone {alone:.3f} s",
        f"beside stores on the same line {beside:.3f} s ({result['ratio']} of alone)",
        f"{result['dropped']:.0f} stores dropped",
    ]


def settle(engine: Engine) -> None:
    """Return when no block has been stored for a while."""
    seen, since = -1.0, time.monotonic()
    while time.monotonic() < since + QUIET:
        engine.first_token([1, 2, 3], "recompute")  # steps bring the worker's counts
        now = engine.metric("vllm:cacheflow_transfer_bytes", direction="store")
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)
    print(".", end="", file=sys.stderr, flush=True)


def _beside(engine: Engine, way: str, drawn: Callable[[], list[int]], kept: list[int]) -> float:
    engine.first_token(drawn(), "recompute")
    if way == "alone":
        settle(engine)
    return engine.first_token(kept, "adaptive")


def _median(seconds: dict[str, list[float]], way: str) -> float:
    return statistics.median(seconds[way])

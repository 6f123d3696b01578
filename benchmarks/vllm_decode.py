"""Seconds between the tokens of other requests while a long prompt is prefilled or restored.

A few requests decode; a long stored prompt comes, again and again. In plain vLLM it is computed in
chunks between their tokens. With CacheFlow it is restored from a store that takes as long for it as
compute does, or computed (the same engine, asked to): the two in turn.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from vllm_engine import BLOCK, VOCABULARY, Engine, quick_llama

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

__all__ = ["add_arguments", "report", "run"]

STREAMS: Final = 3
STREAM_TOKENS: Final = 1000
"""At most while one long prompt is prefilled."""
CHUNK: Final = 512
"""Tokens a step: what is decoded waits for as much prefill at a time."""
GOAL: Final = 1.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes."""
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--windows", type=int, default=12, help="long prompts of each kind")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plain vLLM, then CacheFlow."""
    if options.quick:
        options.prompt, options.windows = 1024, 3
    model, chance = options.model or quick_llama(folder), random.Random(3)
    prompt = chance.choices(range(VOCABULARY), k=options.prompt + 40)
    streams = [chance.choices(range(VOCABULARY), k=100) for _ in range(STREAMS)]
    engine_options = {
        "dtype": "float32",
        "max_model_len": options.prompt + STREAM_TOKENS + 2 * BLOCK,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
    }
    gaps: dict[str, list[float]] = {"plain": [], "computed": [], "restored": []}
    progress = sys.stderr if options.json else sys.stdout
    with Engine.start(folder, model, with_cacheflow=False, **engine_options) as engine:
        alone = engine.first_token(prompt, "recompute")
        for _ in range(options.windows):
            gaps["plain"] += _window(engine, streams, prompt, "recompute")
        print(f"plain vLLM: {_percentile(gaps['plain'], 99):.4f} s", file=progress, flush=True)
    with Engine.start(folder, model, **engine_options) as engine:
        engine.steer()
        engine.have_stored(repeat(prompt), options.prompt)
        engine.steer(seconds=alone / (options.prompt // BLOCK))
        engine.first_token(prompt, "adaptive")
        for _ in range(options.windows):
            gaps["computed"] += _window(engine, streams, prompt, "recompute")
            gaps["restored"] += _window(engine, streams, prompt, "adaptive")
    return {
        "prefill_alone_s": round(alone, 3),
        **{f"{kind}_p50_s": round(_percentile(each, 50), 4) for kind, each in gaps.items()},
        **{f"{kind}_p99_s": round(_percentile(each, 99), 4) for kind, each in gaps.items()},
        "tokens": {kind: len(each) for kind, each in gaps.items()},
    }


def report(result: dict[str, Any]) -> list[str]:
    """The verdict."""
    ratio = result["restored_p99_s"] / result["plain_p99_s"]
    own = result["restored_p99_s"] / result["computed_p99_s"]
    return [
        (
            f"seconds between tokens of others, p99: plain {result['plain_p99_s']}, computed with "
            f"CacheFlow {result['computed_p99_s']}, restored {result['restored_p99_s']}"
        ),
        (
            f"restored: {ratio:.2f} of plain, {own:.2f} of computed in the same engine, in turn "
            f"(goal {GOAL}): {'yes' if ratio <= GOAL else 'NO'}"
        ),
    ]


def _window(
    engine: Engine, streams: list[list[int]], prompt: list[int], policy: str
) -> list[float]:
    """Gaps between tokens of the streams from the long prompt's arrival to its first token."""
    names = {engine.submit(each, "recompute", tokens=STREAM_TOKENS) for each in streams}
    seen: dict[str, int] = {}
    while len(seen) < len(names):
        seen |= {name: len(tokens) for name, tokens in engine.step().items() if name in names}
    last = dict.fromkeys(names, time.perf_counter())
    wanted = engine.submit(prompt, policy)
    gaps: list[float] = []
    is_over = False
    while not is_over:
        outputs = engine.step()
        now = time.perf_counter()
        for name in names & outputs.keys():
            gaps.append(now - last[name])
            last[name] = now
        is_over = wanted in outputs
    engine.abort(*names)
    engine.work(60.0)
    return gaps


def _percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)]

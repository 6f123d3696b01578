"""Random requests, and everything that may happen to them: are the tokens those of plain vLLM?

Float32 and greedy. Prompts share parts of a few long texts; they come in batches of up to eight, to
a pool too small for them, beside requests that are aborted, over a store of every speed that fails,
lies or takes nothing. Plain vLLM answers the same prompts first (with its own prefix cache: half
the prompts' tokens are shared).
"""

from __future__ import annotations

import random
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_engine import BLOCK, VOCABULARY, Engine, smollm2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["add_arguments", "report", "run"]

TEXTS: Final = 5
NEW_TOKENS: Final = 8
LARGEST_BATCH: Final = 8
MILLISECONDS: Final = (0.0, 2.0, 10.0, 25.0, 100.0, 400.0)
"""A block."""
FAULTS: Final[tuple[dict[str, float | str], ...]] = (
    {},
    {},
    {},
    {"fault": "error", "fail_after": 0},
    {"fault": "error", "fail_after": 5},
    {"fault": "corrupt", "fail_after": 3},
    {"fault": "hang", "fail_after": 6},
    {"stores": "full"},
    {"stores": "failed"},
)
"""What is wrong with the store during a batch; nothing, as often as not."""
PATIENCE: Final = 900.0
"""Seconds after which a batch hangs."""
GIB: Final = 1 << 30


@dataclass
class Tally:
    """What came of it."""

    requests: int = 0
    different: int = 0
    aborted: int = 0
    hangs: int = 0
    restored_tokens: float = 0.0
    preemptions: float = 0.0
    failed_loads: float = 0.0
    overlaps: float = 0.0
    """Passes that began before their last loads had ended."""
    failed_overlaps: float = 0.0
    """Of them, those that were computed anew."""
    used_share: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes."""
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=8064, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=1, help="another one for each piece")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plain vLLM's answers, then CacheFlow's."""
    if options.quick:
        options.requests, options.longest = 24, 1024
    progress = sys.stderr if options.json else sys.stdout
    prompts = _prompts(options.requests, options.longest, random.Random(options.seed))
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens", file=progress, flush=True)
    blocks = -(-options.longest // BLOCK)
    engine_options = {
        "dtype": "float32",
        "max_model_len": options.longest + BLOCK,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": LARGEST_BATCH + 4,
    }
    model = options.model or smollm2()
    with Engine.start(
        folder, model, with_cacheflow=False, enable_prefix_caching=True, **engine_options
    ) as plain:
        names = [plain.submit(prompt, tokens=NEW_TOKENS) for prompt in prompts]
        answers = plain.work(PATIENCE * len(prompts))
        expected = [answers[name] for name in names]
    print("plain vLLM has answered", file=progress, flush=True)
    with Engine.start(
        folder,
        model,
        **engine_options,
        # Little more than the longest, and nothing kept back for the whole of a prompt (as vLLM
        # does by itself): what has begun is preempted.
        num_gpu_blocks_override=blocks + 8,
        scheduler_reserve_full_isl=False,
        tier={"capacity_bytes": 3 * GIB},
        extra={"load_deadline": 5.0, "staging_bytes": GIB},
    ) as engine:
        tally = _play(engine, prompts, expected, random.Random(options.seed + 1), progress)
    return vars(tally)


def report(result: dict[str, Any]) -> list[str]:
    """The verdicts."""
    done, different = result["requests"], result["different"]
    return [
        (
            f"{done - different} of {done} answers as plain vLLM's; aborted beside them "
            f"{result['aborted']}, preempted {result['preemptions']:.0f} times, loads that failed "
            f"{result['failed_loads']:.0f}, restored {result['restored_tokens']:.0f} tokens, begun "
            f"under their last loads {result['overlaps']:.0f} and computed anew "
            f"{result['failed_overlaps']:.0f}: "
            f"{'yes' if done and not different and result['preemptions'] else 'NO'}"
        ),
        (
            f"hangs: {result['hangs']}; share of the pool that is in use at the end: "
            f"{result['used_share']:.3f}: "
            f"{'yes' if not result['hangs'] and not result['used_share'] else 'NO'}"
        ),
    ]


def _prompts(number: int, longest: int, chance: random.Random) -> list[list[int]]:
    """Half of them as many short ones as long ones (log-uniform), others of which a few fill the
    pool, each a part of a text and an end of its own; some are asked twice, some need another block
    while tokens are made."""
    texts = [chance.choices(range(VOCABULARY), k=longest) for _ in range(TEXTS)]
    prompts: list[list[int]] = []
    while len(prompts) < number:
        if prompts and chance.random() < 0.2:
            prompts.append(chance.choice(prompts))
            continue
        kind = chance.random()
        if kind < 0.5:
            length = max(int(longest ** chance.random()), 1)
        elif kind < 0.9:
            length = chance.randrange(longest // 8, longest // 3)
        else:
            length = chance.randrange(longest // 2, longest)
        if chance.random() < 0.4:
            length = -(-length // BLOCK) * BLOCK - chance.randrange(NEW_TOKENS - 1)
        shared = length if chance.random() < 0.3 else chance.randrange(length + 1)
        own = chance.choices(range(VOCABULARY), k=length - shared)
        prompts.append([*chance.choice(texts)[:shared], *own])
    return prompts


def _play(
    engine: Engine,
    prompts: list[list[int]],
    expected: list[list[int]],
    chance: random.Random,
    progress: Any,
) -> Tally:
    tally = Tally()
    left = list(zip(prompts, expected, strict=True))
    number = 0
    while left and not tally.hangs:
        number += 1
        size = chance.randrange(1, LARGEST_BATCH + 1)
        batch, left = left[:size], left[size:]
        speed = chance.choice(MILLISECONDS) / 1000
        wishes: dict[str, float | str] = {"seconds": speed, **chance.choice(FAULTS)}
        engine.steer(**wishes, batch=number)
        _batch(engine, batch, [chance.choice(prompts) for _ in range(2)], chance, tally)
        line = f"{tally.requests} done, {tally.different} differ: {wishes}"
        print(line, file=progress, flush=True)
    engine.steer()
    if not tally.hangs:
        tally.used_share = engine.used_share()
    tally.preemptions = engine.metric("vllm:num_preemptions")
    tally.failed_loads = engine.metric("vllm:cacheflow_load_failures")
    tally.overlaps = engine.metric("vllm:cacheflow_overlaps")
    tally.failed_overlaps = engine.metric("vllm:cacheflow_overlaps", result="failed")
    tally.restored_tokens = engine.metric("vllm:cacheflow_restore_tokens", source="load")
    return tally


@contextmanager
def _patience() -> Iterator[None]:
    """A step of an engine that says nothing never ends by itself."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"a batch is not done after {PATIENCE:g} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _batch(
    engine: Engine,
    batch: list[tuple[list[int], list[int]]],
    doomed: list[list[int]],
    chance: random.Random,
    tally: Tally,
) -> None:
    """Ask all at once; those that are to be aborted are aborted after some steps."""
    names = {engine.submit(prompt, tokens=NEW_TOKENS): answer for prompt, answer in batch}
    lost = [engine.submit(prompt, tokens=NEW_TOKENS) for prompt in doomed]
    done: dict[str, list[int]] = {}
    try:
        with _patience():
            for name in lost:
                steps = chance.randrange(1, 12)
                done |= engine.work(PATIENCE, until=iter([False] * steps + [True]).__next__)
                engine.abort(name)
                tally.aborted += 1
            done |= engine.work(PATIENCE)
    except TimeoutError:
        tally.hangs += 1
    for name, answer in names.items():
        tally.requests += 1
        tally.different += done.get(name) != answer

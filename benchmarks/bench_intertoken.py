"""Time between the tokens of one session while another one's prefix is restored.

A session decodes without a pause; meanwhile a long prefix is recomputed, or restored from both
ends over a link as fast as compute. Prints how long each token took, and what that costs the
restore.

    make bench-intertoken ARGS="--quick"
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from rigs import (
    balanced,
    fill,
    model_name,
    model_options,
    opened,
    prompts_of,
    recomputed,
    show,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress

if TYPE_CHECKING:
    from cacheflow.cli.bench_rig import Prompt, Rig
    from cacheflow.restore import Restorer

TALK_TOKENS = 512
"""Already in the cache of the session that decodes."""
ALONE = 40
"""Tokens decoded while nothing else runs."""


class Talk:
    """A session that decodes one token after another, and when each was there."""

    def __init__(self, rig: Rig) -> None:
        self._engine = rig.engine
        self._token = 1

    async def open(self, prompt: Prompt) -> None:
        await self._engine.open("talk", prompt.tokens)
        await self._engine.prefill("talk")
        self._token = await self._engine.first_token("talk")

    async def step(self) -> float:
        """One token; the seconds it took."""
        begin = time.perf_counter()
        (self._token,) = await self._engine.decode(["talk"], [self._token])
        return time.perf_counter() - begin

    async def during(self, work: asyncio.Task[Any]) -> list[float]:
        """Seconds of each token until ``work`` has ended."""
        times = []
        while not work.done():
            times.append(await self.step())
        return times


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways of restoring, with and without somebody who decodes."""
    async with opened(options) as rig, AsyncExitStack() as stack:
        talk_prompt, prompt = await prompts_of(rig, [TALK_TOKENS, options.tokens], SUFFIX_TOKENS)
        with progress() as bar:
            await fill(rig, [prompt], bar)
            task = bar.add_task("restoring", total=2 * options.rounds)
            alone, run = await recomputed(rig, prompt, stack)
            link = await rig.open_link(balanced(rig, prompt, run, 1.0))
            stack.push_async_callback(link.aclose)
            both = await stack.enter_async_context(rig.restorer({"link": link}))
            await rig.alone(both, prompt, "adaptive")
            talk = Talk(rig)
            await talk.open(talk_prompt)
            idle = [await talk.step() for _ in range(ALONE)]
            ways = {}
            for name, restorer in (("recompute", alone), ("adaptive", both)):
                ways[name] = await _way(rig, talk, restorer, prompt, name, options.rounds)
                bar.advance(task, options.rounds)
            await rig.engine.close("talk")
    return {"model": model_name(options), "tokens": options.tokens, "idle_s": idle, "ways": ways}


async def _way(
    rig: Rig, talk: Talk, restorer: Restorer, prompt: Prompt, policy: str, rounds: int
) -> dict[str, Any]:
    quiet, busy, tokens = [], [], []
    for _ in range(rounds):
        quiet.append((await rig.alone(restorer, prompt, policy)).computed_seconds)
        work = asyncio.create_task(rig.alone(restorer, prompt, policy))
        tokens += await talk.during(work)
        busy.append(work.result().computed_seconds)
    return {"token_s": tokens, "restore_s": busy, "restore_alone_s": quiet}


def tell(found: dict[str, Any]) -> None:
    """The table."""
    rows = [("nothing", *_of(found["idle_s"]), "", "")]
    for name, way in found["ways"].items():
        alone, busy = (statistics.median(way[key]) for key in ("restore_alone_s", "restore_s"))
        rows.append((name, *_of(way["token_s"]), f"{busy:.2f}", f"{alone:.2f}"))
    heads = ("meanwhile", "tokens", "median", "p99", "longest", "restore", "without")
    caption = "milliseconds a token; seconds of the restore with and without the decoding session"
    show(f"{found['tokens']} tokens restored, {found['model']}", heads, rows, caption)


def _of(times: list[float]) -> tuple[str, ...]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    figures = (statistics.median(times), p99, ordered[-1])
    return (str(len(times)), *(f"{1e3 * seconds:.1f}" for seconds in figures))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.tokens = options.tokens or (3840 if options.quick else 4096)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

"""What saving behind the requests costs decode: inter-token latency with stores on and off.

One request decodes without a pause. At the start of every other round a finished request is handed
over to be saved, under keys that no tier has yet, into memory and onto the disk; the round goes on
until that is done, so that nothing is left for where nobody looks. The round without stores beside
it takes as many steps. Rounds with and without are interleaved in one run. Every round of the same
kind counts as one: ``noise`` is the same ratio between two halves of the rounds without stores.

    make bench-writes                    # SmolLM2
    make bench-writes ARGS="--quick"     # random weights, a minute
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from rigs import model_name, model_options, opened, prompts_of, show, start

from cacheflow.cli.output import progress
from cacheflow.kv import chunk_keys, key_root
from cacheflow.registry import load_backend
from cacheflow.restore.saver import Saver
from cacheflow.tiers.staged import StagedCopies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.cli.bench_rig import Prompt, Rig
    from cacheflow.types import ChunkKey

DECODING, FINISHED = "decoding", "finished"
CONTEXT = 256
"""Tokens that the decoding request starts with."""
DRAM_BYTES = 1 << 30


class Bench:
    """Two open requests, two tiers, and a saver between them."""

    def __init__(
        self, rig: Rig, saver: Saver, tiers: dict[str, StorageBackend], prompt: Prompt
    ) -> None:
        self.rig = rig
        self.saver = saver
        self.tiers = tiers
        self.prompt = prompt
        self.token = 0
        self.saved_bytes = 0
        self.seconds: list[float] = []
        """Of each save, from handing over to the last chunk being on the disk."""
        self._rounds = 0

    async def open(self, context: Sequence[int]) -> None:
        """Compute both requests; the first steps warm up."""
        engine = self.rig.engine
        for name, tokens in ((DECODING, context), (FINISHED, self.prompt.tokens)):
            await engine.open(name, tokens)
            await engine.prefill(name)
        self.token = await engine.first_token(DECODING)
        await self.round(16)

    def new_keys(self) -> Sequence[ChunkKey]:
        """Of the finished request, as no tier has seen them."""
        self._rounds += 1
        root = key_root(self.rig.engine.identity, self._rounds.to_bytes(4, "big"))
        size = self.rig.engine.layout.chunk_tokens
        return chunk_keys(root, self.prompt.tokens[: self.prompt.prefix], size)

    async def round(self, steps: int) -> list[float]:
        """Seconds between the tokens of ``steps`` steps."""
        gaps = []
        before = time.perf_counter()
        for _ in range(steps):
            gaps.append(await self._step(before))
            before += gaps[-1]
        return gaps

    async def saving(self, steps: int) -> list[float]:
        """The same beside a save, as many more steps as that takes."""
        keys = self.new_keys()
        gaps: list[float] = []
        seconds = 0.0
        start = before = time.perf_counter()
        saved = self.saver.save(FINISHED, keys).values()
        while len(gaps) < steps or not seconds:
            gaps.append(await self._step(before))
            before += gaps[-1]
            # Not awaited in the saver: it makes haste for whoever waits there.
            if not seconds and not any(each.pending for each in saved):
                seconds = before - start
        self.seconds.append(seconds)
        assert all(each.stored == len(keys) for each in saved), saved
        self.saved_bytes += len(keys) * self.rig.engine.layout.payload_bytes()
        await self._clear(keys)
        return gaps

    async def _step(self, before: float) -> float:
        (self.token,) = await self.rig.engine.decode([DECODING], [self.token])
        return time.perf_counter() - before

    async def _clear(self, keys: Sequence[ChunkKey]) -> None:
        for tier in self.tiers.values():
            for infos in await tier.lookup(keys):
                await tier.delete([info.key for info in infos])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, summed up."""
    tokens = options.tokens or (1024 if options.quick else 2048)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(opened(options))
        tiers = await open_tiers(rig, stack)
        staged = StagedCopies(tiers)
        stack.push_async_callback(staged.aclose)
        saver = await stack.enter_async_context(
            Saver(rig.engine, tiers, rig.pool, rig.clock, lambda event: None, staged)
        )
        prompt, talk = await prompts_of(rig, [tokens, CONTEXT], 1)
        bench = Bench(rig, saver, tiers, prompt)
        await bench.open(talk.tokens)
        gaps: dict[bool, list[list[float]]] = {False: [], True: []}
        with progress() as bar:
            task = bar.add_task("decoding", total=2 * options.rounds)
            for number in range(options.rounds):
                steps = max(options.steps, *map(len, gaps[True])) if gaps[True] else options.steps
                for save in (False, True) if number % 2 else (True, False):
                    round_ = bench.saving if save else bench.round
                    gaps[save].append(await round_(steps))
                    bar.advance(task)
        return {
            "model": model_name(options),
            "saved_tokens": tokens,
            "saved_bytes_a_round": bench.saved_bytes // options.rounds,
            "steps": options.steps,
            "rounds": options.rounds,
            "save_seconds": statistics.median(bench.seconds),
            **figures_of(gaps),
        }


async def open_tiers(rig: Rig, stack: AsyncExitStack) -> dict[str, StorageBackend]:
    """Memory, and the disk."""
    dram = await asyncio.to_thread(load_backend, "dram")
    tiers = {
        "dram": await dram.open({"capacity_bytes": DRAM_BYTES}),
        "nvme": await rig.open_link(None),
    }
    for tier in tiers.values():
        stack.push_async_callback(tier.aclose)
    return tiers


def figures_of(gaps: dict[bool, list[list[float]]]) -> dict[str, Any]:
    """Percentiles of all steps with and without stores, and their ratios."""
    found: dict[str, Any] = {}
    for save, name in ((False, "off"), (True, "on")):
        flat = [gap for round_ in gaps[save] for gap in round_]
        found[name] = {f"p{p}": percentile(flat, p) for p in (50, 90, 99)}
    for p in (50, 90, 99):
        found[f"p{p}_ratio"] = found["on"][f"p{p}"] / found["off"][f"p{p}"]
    halves = [[g for round_ in gaps[False][i::2] for g in round_] for i in (0, 1)]
    if all(halves):
        found["p99_noise"] = percentile(halves[1], 99) / percentile(halves[0], 99)
    return found


def percentile(values: Sequence[float], p: int) -> float:
    """The ``p``-th of a hundred, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1]


def tell(found: dict[str, Any]) -> None:
    """The figures as a table."""
    rows = []
    for p in (50, 90, 99):
        off, on = found["off"][f"p{p}"], found["on"][f"p{p}"]
        rows.append([f"p{p}", f"{off * 1e3:.2f}", f"{on * 1e3:.2f}", f"{on / off:.3f}"])
    megabytes = found["saved_bytes_a_round"] / 1e6
    noise = found.get("p99_noise")
    show(
        f"Inter-token latency, ms: {found['model']}",
        ["", "stores off", "stores on", "ratio"],
        rows,
        f"{found['rounds']} rounds of {found['steps']} steps each way; {megabytes:.0f} MB saved "
        f"into two tiers a round in {found['save_seconds']:.2f} s"
        + (f"; noise of p99 {noise:.3f}" if noise else ""),
    )


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Decode while finished requests are saved")
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="tokens of the request that is saved")
    parser.add_argument("--steps", type=int, default=64, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds with and without")
    return start(parser.parse_args(), measure, tell)


if __name__ == "__main__":
    sys.exit(main())

"""Two sources at once on a real engine: half the chunks in memory, half behind a slow link.

The halves are the front and the back of the prefix, or every other chunk. The restored time is
compared with the two-channel fluid bound: cells by what recompute alone took in the same run, the
memory tier by what loading its half alone took, the link by its bandwidth. The suffix, of which the
bound knows nothing, waits until the prefix is there (``patient``).

    make bench-sources
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from rigs import (
    Patient,
    balanced,
    layer_times,
    model_name,
    model_options,
    opened,
    policy_of,
    prompts_of,
    ratio,
    recomputed,
    show,
    slowdown,
    spread,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.registry import load_backend
from cacheflow.simulation import FluidRequest, batch_fluid_seconds
from cacheflow.testing.vault import Vault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.cli.bench_rig import Prompt, Rig, Run
    from cacheflow.restore import Restorer

SPLITS = ("front", "back", "alternate")
"""Where the memory tier's half lies."""
QUICK_TOKENS = 2048
_STEPS = 20


class Split:
    """One way to lay the chunks out in the two tiers, and what was measured of it."""

    def __init__(self, name: str, chunks: int) -> None:
        self.name = name
        half = chunks // 2
        places = {
            "front": range(half),
            "back": range(chunks - half, chunks),
            "alternate": range(0, chunks, 2),
        }
        self.in_memory = set(places[name])
        self.memory_seconds = 0.0
        """Seconds to load the memory tier's half and nothing else."""
        self.restored: list[float] = []
        self.bounds: list[float] = []
        self.slowdowns: list[float] = []
        self.sources: dict[str, float] = {}

    async def lay_out(
        self, rig: Rig, vault: Vault, bandwidth: float, stack: AsyncExitStack
    ) -> dict[str, StorageBackend]:
        """The two tiers, filled; closed with ``stack``."""
        size = rig.engine.layout.payload_bytes()
        memory = await load_backend("dram").open({"capacity_bytes": 2 * len(vault.keys) * size})
        stack.push_async_callback(memory.aclose)
        folder = rig.folder / self.name
        disk = await rig.open_link(None, folder)
        for chunk in range(len(vault.keys)):
            await vault.put(memory if chunk in self.in_memory else disk, chunk)
        await disk.aclose()
        link = await rig.open_link(bandwidth, folder)
        stack.push_async_callback(link.aclose)
        return {"memory": memory, "link": link}

    def note(self, rig: Rig, run: Run, recompute: Run, bandwidth: float) -> None:
        """Take in one restore; ``recompute``: recompute alone in the same round."""
        result = run.restorations[0]
        self.restored.append(result.restored_seconds)
        self.bounds.append(self.bound(rig, recompute, bandwidth))
        mine = layer_times(run.events, run.ids[0])
        self.slowdowns.append(slowdown([(mine, layer_times(recompute.events, recompute.ids[0]))]))
        cells = {"recompute": result.recomputed_cells, **result.loaded_cells}
        self.sources = {name: count / sum(cells.values()) for name, count in cells.items()}

    def bound(self, rig: Rig, recompute: Run, bandwidth: float) -> float:
        """No schedule is faster: see :func:`two_channel_seconds`."""
        layout, grid = rig.engine.layout, rig.engine.grid
        chunk_seconds = layout.layer_stride() / bandwidth
        memory_seconds = self.memory_seconds / len(self.in_memory) / layout.num_layers
        cells = []
        for time in layer_times(recompute.events, recompute.ids[0]):
            if not time.is_suffix:
                first = grid.start(time.tile) // layout.chunk_tokens
                chunks = range(first, first + time.width // layout.chunk_tokens)
                here = sum(chunk in self.in_memory for chunk in chunks)
                away = len(chunks) - here
                cells.append((time.seconds, here * memory_seconds, away * chunk_seconds))
        return two_channel_seconds(cells)


def two_channel_seconds(cells: Sequence[tuple[float, float, float]]) -> float:
    """Least seconds in which compute and two channels make all cells ready, in any order.

    A cell is ``(compute, load over one channel, load over the other)``, both loads being needed.
    Any weighted mean of the two channels' times is at most the longer of them, so the bound over
    one channel that stands for both holds for every weighting; the best of some is taken.
    """
    best = 0.0
    for step in range(_STEPS + 1):
        share = step / _STEPS
        pooled = [
            FluidRequest((compute,), (share * one + (1 - share) * other,))
            for compute, one, other in cells
        ]
        best = max(best, batch_fluid_seconds(pooled))
    return best


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all splits, summed up."""
    async with opened(options) as rig:
        (prompt,) = await prompts_of(rig, [options.tokens], SUFFIX_TOKENS)
        with progress() as bar:
            task = bar.add_task("restoring", total=options.rounds * len(SPLITS))
            async with AsyncExitStack() as stack:
                return await _rounds(rig, prompt, options, stack, lambda: bar.advance(task))


async def _take(rig: Rig, prompt: Prompt) -> Vault:
    await rig.engine.open("cold", prompt.tokens)
    await rig.engine.prefill("cold", 0, prompt.prefix)
    vault = await Vault.take(rig.engine, "cold", prompt.tokens[: prompt.prefix])
    await rig.engine.close("cold")
    return vault


async def _rounds(
    rig: Rig,
    prompt: Prompt,
    options: argparse.Namespace,
    stack: AsyncExitStack,
    tell: Callable[[], None],
) -> dict[str, Any]:
    vault = await _take(rig, prompt)
    alone, recompute = await recomputed(rig, prompt, stack)
    bandwidth = balanced(rig, prompt, recompute, options.ratio)
    splits = [Split(name, len(vault.keys)) for name in SPLITS]
    restorers: dict[str, Restorer] = {}
    for split in splits:
        tiers = await split.lay_out(rig, vault, bandwidth, stack)
        split.memory_seconds = await _memory_alone(rig, prompt, split, vault)
        restorers[split.name] = await stack.enter_async_context(rig.restorer(tiers))
        await rig.alone(restorers[split.name], prompt, policy_of(options.policy))
    for number in range(options.rounds):
        if number:
            recompute = await rig.together(alone, [prompt], "recompute")
        for split in splits:
            run = await rig.together(restorers[split.name], [prompt], policy_of(options.policy))
            split.note(rig, run, recompute, bandwidth)
            tell()
    return summary(options, splits)


async def _memory_alone(rig: Rig, prompt: Prompt, split: Split, vault: Vault) -> float:
    """Seconds to load as many chunks as the memory tier holds, from a memory tier alone."""
    count = len(split.in_memory)
    size = rig.engine.layout.payload_bytes()
    memory = await load_backend("dram").open({"capacity_bytes": 2 * count * size})
    for chunk in range(count):
        await vault.put(memory, chunk)
    whole = count * rig.engine.layout.chunk_tokens
    short = rig.prompt(prompt.tokens[: whole + SUFFIX_TOKENS])
    async with rig.restorer({"memory": memory}) as restorer:
        times = [(await rig.alone(restorer, short, "load")).restored_seconds for _ in range(3)]
    await memory.aclose()
    return min(times)


def summary(options: argparse.Namespace, splits: Sequence[Split]) -> dict[str, Any]:
    """Restored time against its bound, split by split."""
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "compute_io": options.ratio,
        "splits": {
            split.name: {
                "restored_s": split.restored,
                "bound_s": split.bounds,
                "over_bound": spread(
                    [a / b for a, b in zip(split.restored, split.bounds, strict=True)]
                ),
                "compute_slowdown": split.slowdowns,
                "memory_alone_s": split.memory_seconds,
                "sources": split.sources,
            }
            for split in splits
        },
    }


def tell(found: dict[str, Any]) -> None:
    """The table."""
    rows = []
    for name, split in found["splits"].items():
        over = split["over_bound"]
        shares = [split["sources"].get(s, 0.0) for s in ("recompute", "memory", "link")]
        rows.append(
            (
                name,
                f"{statistics.median(split['restored_s']):.3f}",
                f"{statistics.median(split['bound_s']):.3f}",
                f"{over['median']:.3f}",
                f"{over['min']:.3f}-{over['max']:.3f}",
                " / ".join(f"{share:.0%}" for share in shares),
                f"{statistics.median(split['compute_slowdown']):.2f}",
            )
        )
    heads = ("memory holds", "restored", "bound", "ratio", "spread", "comp. / mem. / link", "slow")
    caption = (
        f"seconds, medians; {found['tokens']} tokens; the link alone takes as long as recompute / "
        f"{found['compute_io']:g} for the whole prefix; slow: compute's time for its cells by "
        "that of recompute alone"
    )
    show(f"two sources, {found['model']}", heads, rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratio", type=ratio, default=1.0, help="compute:I/O over the link alone")
    parser.add_argument("--policy", default=Patient.name)
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else 4096)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

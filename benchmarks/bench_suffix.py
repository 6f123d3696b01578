"""What loads that land just before the suffix needs them save, on a real engine.

A prefix is restored over a link while a long suffix waits to be computed behind it. Compares the
TTFT of ``adaptive``, which orders loads by when the suffix's pass reaches their layer, with that
of a variant that starts the suffix when the whole prefix is there, interleaved in one run.

    make bench-suffix
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
    costs_of,
    fill,
    model_name,
    model_options,
    opened,
    policy_of,
    prompts_of,
    ratio,
    recomputed,
    show,
    spread,
    start,
)

from cacheflow.cli.output import progress
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.simulation import batch_fluid_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.cli.bench_rig import Prompt, Rig, Run

QUICK_TOKENS = 2048


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, summed up."""
    async with opened(options) as rig:
        (prompt,) = await prompts_of(rig, [options.tokens], options.suffix)
        with progress() as bar:
            await fill(rig, [prompt], bar)
            task = bar.add_task("restoring", total=options.rounds)
            async with AsyncExitStack() as stack:
                return await _rounds(rig, prompt, options, stack, lambda: bar.advance(task))


async def _rounds(
    rig: Rig,
    prompt: Prompt,
    options: argparse.Namespace,
    stack: AsyncExitStack,
    tell: Callable[[], None],
) -> dict[str, Any]:
    _, recompute = await recomputed(rig, prompt, stack)
    bandwidth = balanced(rig, prompt, recompute, options.ratio)
    link = await rig.open_link(bandwidth)
    stack.push_async_callback(link.aclose)
    names = (options.policy, options.baseline)
    restorers = {
        name: await stack.enter_async_context(rig.restorer({"link": link})) for name in names
    }
    for restorer in restorers.values():  # what they know of the link is warm then
        await rig.together(restorer, [prompt], options.policy)
    runs: dict[str, list[Run]] = {name: [] for name in restorers}
    for number in range(options.rounds):
        for name in names if number % 2 else names[::-1]:
            runs[name].append(await rig.together(restorers[name], [prompt], policy_of(name)))
        tell()
    bound = batch_fluid_seconds(costs_of(rig, recompute, bandwidth))
    return summary(options, recompute, bound, runs)


def summary(
    options: argparse.Namespace, recompute: Run, bound: float, runs: dict[str, list[Run]]
) -> dict[str, Any]:
    """TTFT of both, their ratio within each round, and the bound that neither can beat."""
    pairs = zip(runs[options.policy], runs[options.baseline], strict=True)
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "suffix": options.suffix,
        "compute_io": options.ratio,
        "recompute_ttft_s": recompute.mean,
        "bound_s": bound,
        "ratio": spread([ours.mean / theirs.mean for ours, theirs in pairs]),
        "ways": {
            name: {
                "ttft_s": [run.mean for run in each],
                "restored_s": [run.restorations[0].restored_seconds for run in each],
                "first_token_s": [run.first_tokens[0] for run in each],
                "recomputed_share": [run.restorations[0].recomputed_share for run in each],
            }
            for name, each in runs.items()
        },
    }


def tell(found: dict[str, Any]) -> None:
    """The table and the verdict."""
    rows = []
    for name, way in found["ways"].items():
        median = {key: statistics.median(values) for key, values in way.items()}
        rows.append(
            (
                name,
                f"{median['ttft_s']:.2f}",
                f"{min(way['ttft_s']):.2f}-{max(way['ttft_s']):.2f}",
                f"{median['restored_s']:.2f}",
                f"{median['recomputed_share']:.0%}",
                f"{found['bound_s'] / median['ttft_s']:.3f}",
            )
        )
    saved = {key: f"{1 - value:.1%}" for key, value in found["ratio"].items()}
    caption = (
        f"seconds, medians; bound with the suffix hidden behind loads: {found['bound_s']:.2f}; "
        f"TTFT saved within a round: {saved['median']} ({saved['max']} to {saved['min']})"
    )
    title = f"{found['tokens']} restored, suffix of {found['suffix']}, {found['model']}"
    show(title, ("policy", "TTFT", "spread", "restored", "front", "eff."), rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 256")
    parser.add_argument("--suffix", type=int, default=1024, help="tokens behind it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratio", type=ratio, default=1.0, help="compute:I/O of the prefix")
    parser.add_argument("--policy", default=Adaptive.name)
    parser.add_argument("--baseline", default=Patient.name, help="what it is compared with")
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else 4096)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

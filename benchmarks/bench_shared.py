"""Many sessions on one prefix, on a real engine: restored once for all, or each for itself.

Eight prompts with one beginning arrive together over a link as fast as compute. ``adaptive`` is
compared with a variant that shares nothing, interleaved in one run.

    make bench-shared ARGS="--quick"
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from rigs import (
    balanced,
    fill,
    model_name,
    model_options,
    opened,
    prompts_of,
    recomputed,
    show,
    spread,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.scheduling import load_policy
from cacheflow.scheduling.policies.adaptive import Adaptive

if TYPE_CHECKING:
    from cacheflow.cli.bench_rig import Run
    from cacheflow.scheduling import Policy


class Alone(Adaptive):
    """``adaptive``, every request for itself."""

    name: ClassVar[str] = "alone"
    shares: ClassVar[bool] = False


WAYS: dict[str, Policy] = {"shared": load_policy("adaptive"), Alone.name: Alone()}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both ways, summed up."""
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    async with opened(options) as rig, AsyncExitStack() as stack:
        (prompt,) = await prompts_of(rig, [options.tokens], SUFFIX_TOKENS)
        prompts = [prompt] * options.sessions
        with progress() as bar:
            await fill(rig, [prompt], bar)
            _, recompute = await recomputed(rig, prompt, stack)
            link = await rig.open_link(balanced(rig, prompt, recompute, 1.0))
            stack.push_async_callback(link.aclose)
            restorer = await stack.enter_async_context(rig.restorer({"link": link}))
            await rig.alone(restorer, prompt, "adaptive")
            task = bar.add_task("restoring", total=options.rounds * len(WAYS))
            for number in range(options.rounds):
                for name in list(WAYS)[:: 1 if number % 2 else -1]:
                    runs[name].append(await rig.together(restorer, prompts, WAYS[name]))
                    bar.advance(task)
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "sessions": options.sessions,
        "ways": {name: _figures(each, options.tokens) for name, each in runs.items()},
    }


def _figures(runs: list[Run], tokens: int) -> dict[str, Any]:
    done = [one for run in runs for one in run.restorations]
    layers = max(one.recomputed_cells + sum(one.loaded_cells.values()) for one in done) // tokens
    made = sum(one.recomputed_cells + sum(one.loaded_cells.values()) for one in done)
    return {
        "mean_ttft_s": spread([run.mean for run in runs]),
        "last_s": spread([run.last for run in runs]),
        "prefixes_restored": made / (len(runs) * tokens * layers),
    }


def tell(found: dict[str, Any]) -> None:
    """The table."""
    rows = [
        (
            name,
            f"{way['mean_ttft_s']['median']:.2f}",
            f"{way['last_s']['median']:.2f}",
            f"{way['last_s']['min']:.2f}-{way['last_s']['max']:.2f}",
            f"{way['prefixes_restored']:.2f}",
        )
        for name, way in found["ways"].items()
    ]
    shared, alone = (found["ways"][name]["mean_ttft_s"]["median"] for name in WAYS)
    title = f"{found['sessions']} sessions on {found['tokens']} tokens, {found['model']}"
    caption = (
        f"seconds, medians; restored: how often in all; mean shared / alone: {shared / alone:.2f}"
    )
    show(title, ("way", "mean TTFT", "last", "spread", "restored"), rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 256")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.tokens = options.tokens or (2048 if options.quick else 4096)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))

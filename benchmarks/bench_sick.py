"""A channel that hangs, and one that becomes ten times slower midway, on a real engine.

*Hung*: every read hangs from the start (or from half of a healthy restore on) and never answers.
The first request has to find out; for the next one the tier is set aside. What counts is the time
to the first token over that of recompute alone, right before; *waited* is the part of it in which
compute stood still, in percent of recompute alone: what other programs did to compute is not in it.
*Two layers* of compute are what passes at least before a channel can look late.

*Slower*: after half of its expected time the link has a tenth of its bandwidth. The restored time
is compared with the fluid bound of the real speeds: cells by what recompute alone took in the same
round, the link by its bandwidth then and now.

    make bench-sick
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rigs import (
    balanced,
    fill,
    layer_times,
    model_name,
    model_options,
    opened,
    prompts_of,
    recomputed,
    show,
    slowdown,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.storage_backends.throttled import ThrottledBackend
from cacheflow.testing.faults import Fault, FaultKind, FaultyBackend
from cacheflow.tiers import Guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.cli.bench_rig import Prompt, Rig, Run

RATIOS: Final = {"disk": None, "3:1": 3.0, "1:1": 1.0}
"""Recompute time by load time of the healthy channel."""
ONSETS: Final = {"from the start": 0.0, "midway": 0.5}
"""When reads begin to hang, as a share of a healthy restore."""
SLOWER: Final = 10.0
QUICK_TOKENS: Final = 2048


@dataclass(slots=True)
class Hung:
    """Requests over one channel that hangs; one entry a round."""

    first: list[float] = field(default_factory=list)
    """Time to the first token over recompute alone, of the request that meets it."""
    later: list[float] = field(default_factory=list)
    """... of the next one."""
    waited: list[float] = field(default_factory=list)
    """Of the first: seconds in which compute stood still, over recompute alone, less what it
    stands still there."""
    quantum: list[float] = field(default_factory=list)
    """Two layers of the widest tile over recompute alone: no channel looks late before."""


@dataclass(slots=True)
class Slower:
    """Restores over a link that becomes slower; one entry a round."""

    over_bound: list[float] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)


async def hang(
    rig: Rig, prompt: Prompt, alone: Run, compute_io: float | None, onset: float, seen: Hung
) -> None:
    """A channel of its own: healthy once, then hung for two requests."""
    seconds = alone.restorations[0].restored_seconds
    bandwidth = None if compute_io is None else rig.nbytes(prompt.prefix) * compute_io / seconds
    faulty = FaultyBackend(await rig.open_link(bandwidth))
    tier = Guarded(faulty, "link")
    try:
        async with rig.restorer({"link": tier}) as restorer:
            healthy = await rig.alone(restorer, prompt, "adaptive")
            after = onset * healthy.restored_seconds
            faulty.inject(Fault(FaultKind.HANG, "load", after=after))
            first = await rig.together(restorer, [prompt], "adaptive")
            later = await rig.together(restorer, [prompt], "adaptive")
    finally:
        faulty.heal()
        await tier.aclose()
    seen.first.append(first.ttft[0] / alone.ttft[0])
    seen.later.append(later.ttft[0] / alone.ttft[0])
    seen.waited.append((idle(first) - idle(alone)) / alone.ttft[0])
    widest = max(time.seconds for time in layer_times(alone.events, alone.ids[0]))
    seen.quantum.append(2 * widest / alone.ttft[0])


def idle(run: Run) -> float:
    """Seconds until the first token in which compute stood still."""
    return run.ttft[0] - sum(time.seconds for time in layer_times(run.events, run.ids[0]))


async def slow(rig: Rig, prompt: Prompt, alone: Run, compute_io: float, seen: Slower) -> None:
    """A channel of its own: healthy once, then slower from the middle of the second restore on."""
    bandwidth = balanced(rig, prompt, alone, compute_io)
    link = await rig.open_link(bandwidth)
    assert isinstance(link, ThrottledBackend)
    tier = Guarded(link, "link")
    try:
        async with rig.restorer({"link": tier}) as restorer:
            healthy = await rig.alone(restorer, prompt, "adaptive")
            when = healthy.restored_seconds / 2

            def slower() -> None:
                link.link.bandwidth = bandwidth / SLOWER

            timer = asyncio.get_running_loop().call_later(when, slower)
            run = await rig.together(restorer, [prompt], "adaptive")
            timer.cancel()
    finally:
        await tier.aclose()
    result = run.restorations[0]
    seen.over_bound.append(result.restored_seconds / bound(rig, alone, bandwidth, when))
    times = [layer_times(each.events, each.ids[0]) for each in (run, alone)]
    seen.slowdowns.append(slowdown([(times[0], times[1])]))
    seen.recomputed.append(result.recomputed_share)


def bound(rig: Rig, alone: Run, bandwidth: float, when: float) -> float:
    """No schedule restores sooner; see :func:`meeting_seconds`."""
    layout = rig.engine.layout
    times = [time for time in layer_times(alone.events, alone.ids[0]) if not time.is_suffix]
    cells = [
        (time.seconds, float(time.width // layout.chunk_tokens * layout.layer_stride()))
        for time in times
    ]
    return meeting_seconds(cells, bandwidth, when)


def meeting_seconds(cells: Sequence[tuple[float, float]], bandwidth: float, when: float) -> float:
    """Compute from the front, the rest over the link as it is before ``when`` and afterwards.

    A cell is ``(seconds, bytes)``; where both sides meet it may be shared.
    """
    left, spent, best = sum(nbytes for _, nbytes in cells), 0.0, float("inf")
    for seconds, nbytes in cells:
        low, high = 0.0, 1.0
        for _ in range(30):
            share = (low + high) / 2
            if spent + share * seconds < _load(left - share * nbytes, bandwidth, when):
                low = share
            else:
                high = share
        load = _load(left - high * nbytes, bandwidth, when)
        best = min(best, max(spent + high * seconds, load))
        left, spent = left - nbytes, spent + seconds
    return min(best, spent)


def _load(nbytes: float, bandwidth: float, when: float) -> float:
    """Seconds for ``nbytes`` over the link that slows down at ``when``."""
    before = bandwidth * when
    if nbytes <= before:
        return nbytes / bandwidth
    return when + (nbytes - before) * SLOWER / bandwidth


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    hung = {(link, onset): Hung() for link in options.links for onset in ONSETS}
    slower = {link: Slower() for link in options.links if RATIOS[link]}
    async with opened(options) as rig, AsyncExitStack() as stack:
        (prompt,) = await prompts_of(rig, [options.tokens], SUFFIX_TOKENS)
        with progress() as bar:
            await fill(rig, [prompt], bar)
            task = bar.add_task("restoring", total=options.rounds * (len(hung) + len(slower)))
            restorer, _ = await recomputed(rig, prompt, stack)
            for _ in range(options.rounds):
                await _round(rig, prompt, restorer, hung, slower, lambda: bar.advance(task))
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "hung": {
            f"{link}, {onset}": {
                "first": each.first,
                "later": each.later,
                "waited": each.waited,
                "quantum": each.quantum,
            }
            for (link, onset), each in hung.items()
        },
        "slower": {
            link: {
                "over_bound": each.over_bound,
                "compute_slowdown": each.slowdowns,
                "recomputed": each.recomputed,
            }
            for link, each in slower.items()
        },
    }


async def _round(
    rig: Rig,
    prompt: Prompt,
    restorer: Any,
    hung: dict[tuple[str, str], Hung],
    slower: dict[str, Slower],
    tell: Callable[[], None],
) -> None:
    for (link, onset), seen in hung.items():
        alone = await rig.together(restorer, [prompt], "recompute")
        await hang(rig, prompt, alone, RATIOS[link], ONSETS[onset], seen)
        tell()
    for link, slowed in slower.items():
        alone = await rig.together(restorer, [prompt], "recompute")
        compute_io = RATIOS[link]
        assert compute_io is not None
        await slow(rig, prompt, alone, compute_io, slowed)
        tell()


def tell(found: dict[str, Any]) -> None:
    """Two tables."""
    rows = [
        (
            name,
            *(_ratios(each[what]) for what in ("first", "later")),
            _percent(each["waited"]),
            f"{statistics.median(each['quantum']):.1%}",
        )
        for name, each in found["hung"].items()
    ]
    heads: tuple[str, ...] = ("channel, hung", "first", "later", "waited", "two layers")
    caption = "time to the first token over recompute alone: median, least - most"
    show(f"hung, {found['model']}, {found['tokens']} tokens", heads, rows, caption)
    rows = [
        (
            name,
            _ratios(each["over_bound"]),
            f"{statistics.median(each['recomputed']):.0%}",
            f"{statistics.median(each['compute_slowdown']):.2f}",
        )
        for name, each in found["slower"].items()
    ]
    heads = ("channel", "restored / bound", "recomputed", "compute slowed")
    caption = f"{SLOWER:g} times slower midway; bound: fluid, of the real speeds"
    show(f"slower, {found['model']}, {found['tokens']} tokens", heads, rows, caption)


def _ratios(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}, {min(values):.3f} - {max(values):.3f}"


def _percent(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%}, {max(values):.1%} at most"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", type=lambda text: text.split(","), default=list(RATIOS))
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else 4096)
    return options


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # a tier that is set aside says so
    sys.exit(start(parse(), measure, tell))

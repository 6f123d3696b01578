"""A channel that hangs, and one that becomes ten times slower midway, on a real engine.

*Hung*: every read hangs from the start (or from half of a healthy restore on) and never answers.
The first request has to find out; for the next one the tier is set aside. What counts is the time
to the first token over that of recompute alone, right before; *waited* is the part of it in which
compute stood still, in percent of recompute alone: what other programs did to compute is not in it.
*Two layers* of compute are what passes at least before a channel can look late.

*Slower*: after half of its expected time the link has a tenth of its bandwidth. The restored time
is compared with the fluid bound of the real speeds, which knows the change beforehand: cells by
what recompute alone took in the same round, the link by its bandwidth then and now. Beside it, in
shares of the bound, what no decision takes back: a layer of compute, and the loads in flight then.

``--virtual``: the same in virtual time at more lengths and ratios, without noise; there also the
time to the first token over its own bound, and the restored time over the best that could be had
from the change on, with what had been begun and left by then.

    make bench-sick
    make bench-sick ARGS=--virtual
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
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
from sick_virtual import SLOWER, Slowed, hung_ratio, meeting_seconds, slowed

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
QUICK_TOKENS: Final = 2048
VIRTUAL_TOKENS: Final = (512, 1024, 2048, 4096)
VIRTUAL_RATIOS: Final = (1 / 3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHARES: Final = (0.0, 0.1, 0.25, 0.4, 0.5, 0.75)
"""Of a healthy restore, after which the link hangs in virtual time."""


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
    layers: list[float] = field(default_factory=list)
    """The longest layer over the bound."""
    flying: list[float] = field(default_factory=list)
    """What was in flight at the change takes so much of the bound."""
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

            flying = [0]

            def slower() -> None:
                flying.append(restorer.scheduler.channel("link").in_flight_bytes)
                link.link.bandwidth = bandwidth / SLOWER

            timer = asyncio.get_running_loop().call_later(when, slower)
            run = await rig.together(restorer, [prompt], "adaptive")
            timer.cancel()
    finally:
        await tier.aclose()
    result = run.restorations[0]
    least = bound(rig, alone, bandwidth, when)
    seen.over_bound.append(result.restored_seconds / least)
    prefix = [each for each in layer_times(alone.events, alone.ids[0]) if not each.is_suffix]
    seen.layers.append(max(each.seconds for each in prefix) / least)
    seen.flying.append(flying[-1] * SLOWER / bandwidth / least)
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


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    if options.virtual:
        return await measure_virtual()
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
                "layers": each.layers,
                "flying": each.flying,
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
    for link, slow_link in slower.items():
        alone = await rig.together(restorer, [prompt], "recompute")
        compute_io = RATIOS[link]
        assert compute_io is not None
        await slow(rig, prompt, alone, compute_io, slow_link)
        tell()


async def measure_virtual() -> dict[str, Any]:
    """Every length at every ratio."""
    return {
        "virtual": {
            tokens: {
                "hung": [max(hung_ratio(tokens, r, s) for s in SHARES) for r in VIRTUAL_RATIOS],
                "slower": [asdict(slowed(tokens, ratio)) for ratio in VIRTUAL_RATIOS],
            }
            for tokens in VIRTUAL_TOKENS
        }
    }


def tell_virtual(found: dict[int, dict[str, Any]]) -> None:
    """Two tables: one row a length, one row a length and ratio."""
    ratios = [f"{r:g}:1" if r >= 1 else f"1:{1 / r:.0f}" for r in VIRTUAL_RATIOS]
    rows = [(str(n), *(f"{x:.3f}" for x in each["hung"])) for n, each in found.items()]
    shares = ", ".join(f"{share:g}" for share in SHARES)
    caption = f"first token over recompute alone; the worst of hanging after {shares} of a restore"
    show("hung, virtual time", ("tokens", *ratios), rows, caption)
    rows = []
    for tokens, each in found.items():
        for ratio, one in zip(ratios, each["slower"], strict=True):
            seen = Slowed(**one)
            ways = (
                seen.restored / seen.bound,
                seen.first_token / seen.first_token_bound,
                seen.restored / seen.from_change,
            )
            units = (seen.layer / seen.bound, seen.flying / seen.bound)
            shown = (f"{seen.bound:.3f}", *(f"{x:.2f}" for x in ways), *(f"{u:.0%}" for u in units))
            rows.append((str(tokens), ratio, *shown))
    heads = "tokens", "link", "bound s", "restored", "first token", "from change", "layer", "flying"
    caption = f"{SLOWER:g} times slower midway; over bounds of the real speeds"
    show("slower, virtual time", heads, rows, caption)


def tell(found: dict[str, Any]) -> None:
    """Two tables."""
    if "virtual" in found:
        tell_virtual(found["virtual"])
        return
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
            f"{statistics.median(each['layers']):.1%}",
            f"{statistics.median(each['flying']):.1%}",
            f"{statistics.median(each['recomputed']):.0%}",
            f"{statistics.median(each['compute_slowdown']):.2f}",
        )
        for name, each in found["slower"].items()
    ]
    heads = ("channel", "restored / bound", "layer", "flying", "recomputed", "compute slowed")
    caption = (
        f"{SLOWER:g} times slower midway; bound: fluid, of the real speeds; layer, in flight: of it"
    )
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
    parser.add_argument("--virtual", action="store_true", help="in virtual time, no engine")
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else 4096)
    return options


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # a tier that is set aside says so
    sys.exit(start(parse(), measure, tell))

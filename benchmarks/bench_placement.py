"""Placement: what stores keep, and what that is worth in time to first token.

The real scheduler in virtual time over stores that evict and write by the very policies of real
tiers: least recently used + everything stored, against cost-aware + planned, and the steps in
between, at several shares of the working set. Requests are conversations in Mooncake's trace format
(made up, or ``--trace FILE``). Then a small real run: one engine, one nvme tier behind a link,
conversations that come back, the same two placements at the same capacities.

    make bench-placement
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.progress import track
from rigs import model_options, opened, show, start

from cacheflow.session import CacheFlow
from cacheflow.settings import Settings, TierSettings
from cacheflow.simulation import Channel, Scenario, Synthetic, load_link, load_machine, simulate
from cacheflow.simulation.traces import BLOCK_TOKENS, load_trace, parse_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.simulation import Job
    from cacheflow.tiers.eviction import EvictionName

SHARES: Final = (0.2, 0.5, 1.0)
"""Capacities, as shares of the bytes of everything that is ever stored."""
LINKS: Final = ("10gbps", "25gbps", "100gbps")
TURN_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to place."""

    eviction: EvictionName
    writes: Literal["all", "planned"]

    @property
    def name(self) -> str:
        return f"{self.eviction} + {self.writes}"


WAYS: Final = (
    Way("lru", "all"),
    Way("s3fifo", "all"),
    Way("cost-aware", "all"),
    Way("lru", "planned"),
    Way("cost-aware", "planned"),
)
ENDS: Final = (WAYS[0], WAYS[-1])


def conversations(sessions: int, gap: float, seed: int) -> Iterator[str]:
    """Lines of a made-up trace: a third are single questions, the others go on for some turns,
    about a minute apart; over one of two system prompts. ``gap``: seconds between their starts."""
    chance, fresh, began = random.Random(f"placement:{seed}"), count(1000), 0.0
    lines: list[tuple[float, str]] = []
    for _ in range(sessions):
        began += chance.expovariate(1 / gap)
        now, blocks = began, list(chance.choice((range(2), range(10, 14))))
        tokens = len(blocks) * BLOCK_TOKENS + round(chance.lognormvariate(8.3, 0.9))
        turns = 1 if chance.random() < 0.35 else 2 + min(12, int(chance.expovariate(0.25)))
        for _ in range(turns):
            tokens = min(tokens, 120_000)
            blocks += (next(fresh) for _ in range(tokens // BLOCK_TOKENS - len(blocks)))
            partial = [next(fresh)] if tokens % BLOCK_TOKENS else []
            answer = 1 + int(chance.expovariate(1 / 340))
            entry = {
                "timestamp": int(now * 1000),
                "input_length": tokens,
                "output_length": answer,
                "hash_ids": [*blocks, *partial],
            }
            lines.append((now, json.dumps(entry)))
            tokens += answer + round(chance.lognormvariate(6.9, 0.9))
            now += answer * 0.02 + chance.expovariate(1 / TURN_SECONDS)
    return (line for _, line in sorted(lines))


def simulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a link and capacity: TTFT by way."""
    found = []
    jobs = _jobs(options)
    working_set = len({block for job in jobs for block in job.leaves})
    workload = Synthetic("conversations", jobs)
    settings = list(product(options.links, options.shares))
    for link, share in track(settings, "simulated", console=Console(stderr=True)):
        scenario = Scenario(load_machine(options.preset), (Channel(load_link(link)),))
        blocks = max(1, round(share * working_set))
        entry: dict[str, Any] = {"link": link, "share": share, "blocks": blocks}
        ttft: dict[str, dict[str, float]] = {}
        for way in WAYS:
            # Where all has room nothing is evicted: all that differs is what is written.
            same = way.writes if blocks >= working_set else way.name
            if same not in ttft:
                run = replace(
                    scenario, shared_blocks=blocks, eviction=way.eviction, writes=way.writes
                )
                summary = simulate(run, workload, "adaptive").summary
                ttft[same] = {"mean": summary.ttft.mean, "p99": summary.ttft.p99}
            entry[way.name] = ttft[same]
        found.append(entry)
    return found


def _jobs(options: argparse.Namespace) -> Sequence[Job]:
    if options.trace:
        return load_trace(Path(options.trace), limit=options.limit).first()
    lines = conversations(options.sessions, options.gap, options.seed)
    return list(parse_trace(lines, "conversations"))


# -- the small real run ------------------------------------------------------------------------


async def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """TTFT of real turns that come back after their KV was forgotten, by way and capacity; every
    turn is played both ways, one right after the other, in either order."""
    seconds: defaultdict[tuple[float, str], list[float]] = defaultdict(list)
    async with opened(options) as rig:
        turns = _turns(options, rig)
        working_set = _working_set(rig, turns)
        bandwidth = await _balanced(rig, turns)
        runs = list(product(range(options.rounds), options.shares))
        for number, share in track(runs, "measured", console=Console(stderr=True)):
            capacity = max(1 << 20, round(share * working_set))
            for way, ttft in (await _replay(rig, turns, capacity, bandwidth, number)).items():
                seconds[share, way] += ttft
    return [
        {"share": share, **{way.name: seconds[share, way.name] for way in ENDS}}
        for share in options.shares
    ]


def _turns(options: argparse.Namespace, rig: Rig) -> list[tuple[int, list[int]]]:
    """``(conversation, prompt)`` in the order of arrival; every conversation has three turns."""
    chance, vocabulary = random.Random(options.seed), 320
    order = [talk for talk in range(options.talks) for _ in range(3)]
    chance.shuffle(order)
    prompts: dict[int, list[int]] = {talk: [] for talk in range(options.talks)}
    turns = []
    for talk in order:
        more = options.tokens if not prompts[talk] else options.tokens // 4
        prompts[talk] += (chance.randrange(vocabulary) for _ in range(more))
        turns.append((talk, list(prompts[talk])))
    return turns


def _working_set(rig: Rig, turns: Sequence[tuple[int, list[int]]]) -> int:
    longest = {talk: len(prompt) for talk, prompt in turns}
    layout = rig.engine.layout
    chunks = sum(tokens // layout.chunk_tokens for tokens in longest.values())
    return int(chunks * (layout.payload_bytes() + 4096))


async def _balanced(rig: Rig, turns: Sequence[tuple[int, list[int]]]) -> float:
    """The bandwidth at which loading a long prompt takes as long as recomputing it."""
    prompt = max((prompt for _, prompt in turns), key=len)
    async with CacheFlow.open(Settings(keep_costs=False), engine=rig.engine) as flow:
        for name in ("warm", "timed"):
            session, started = flow.session(name), flow.clock.now()
            async for _ in session.generate(prompt, max_new_tokens=1, save=False):
                pass
            seconds = flow.clock.now() - started
            await session.forget()  # or the next one would share its KV, and compute next to none
    return float(len(prompt) * rig.engine.layout.token_bytes / seconds)


async def _replay(
    rig: Rig, turns: Sequence[tuple[int, list[int]]], capacity: int, bandwidth: float, number: int
) -> dict[str, list[float]]:
    """TTFT of the turns that had a turn before them, by way."""
    found: dict[str, list[float]] = {way.name: [] for way in ENDS}
    seen: set[int] = set()
    async with AsyncExitStack() as stack:
        flows = {}
        for way in ENDS:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings = _settings(folder, way, capacity, bandwidth)
            flow = CacheFlow.open(settings, engine=rig.engine)
            flows[way.name] = await stack.enter_async_context(flow)
        for turn, (talk, prompt) in enumerate(turns, number):
            names = list(flows) if turn % 2 else list(flows)[::-1]
            for name in names:
                first = await _first_token(flows[name], f"{name} {talk}", prompt)
                if talk in seen:
                    found[name].append(first)
            seen.add(talk)
    return found


def _settings(folder: str, way: Way, capacity: int, bandwidth: float) -> Settings:
    inner = {"inner": "nvme", "inner_options": {"path": folder, "fsync": False}}
    tier = TierSettings.model_validate(
        {
            "name": "disk",
            "backend": "throttled",
            "options": {**inner, "bandwidth": bandwidth, "latency": 1e-3},
            "capacity_bytes": capacity,
            "eviction": way.eviction,
            "lease_seconds": 1.0,
        }
    )
    return Settings(tiers=(tier,), keep_costs=False, write_policy=way.writes)


async def _first_token(flow: CacheFlow, name: str, prompt: list[int]) -> float:
    """Seconds to the first token; then all is stored, and the session forgets its KV."""
    session = flow.session(name)
    started, first = flow.clock.now(), 0.0
    async for _ in session.generate(prompt, max_new_tokens=1):
        first = first or flow.clock.now() - started
    await flow.flush()
    await session.forget()
    return first


# -- output ------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    found: dict[str, Any] = {"preset": options.preset}
    if not options.measured_only:
        found["simulated"] = simulated(options)
    if not options.simulated_only:
        found["measured"] = await measured(options)
    return found


def tell(found: dict[str, Any]) -> None:
    """Two tables."""
    if "simulated" in found:
        names = [way.name for way in WAYS]
        rows = [
            [f"{entry['link']} {entry['share']:.0%}", *(_both(entry[name]) for name in names)]
            for entry in found["simulated"]
        ]
        title = f"Mean / P99 TTFT in ms, {found['preset']}, virtual time"
        caption = "capacity: share of all that is ever stored"
        show(title, ["link, capacity", *names], rows, caption)
    if "measured" in found:
        names = [way.name for way in ENDS]
        title = "Mean TTFT in ms of turns that come back, measured"
        heads = ["capacity", *names, "difference", "turns"]
        show(title, heads, [_paired(entry) for entry in found["measured"]], _ERROR)


_ERROR: Final = "difference: of the means, and the standard error of the mean of all pairs"


def _paired(entry: dict[str, Any]) -> list[str]:
    before, after = (entry[way.name] for way in ENDS)
    mean, pairs = statistics.mean(before), [b - a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
    means = [f"{1e3 * statistics.mean(each):.0f}" for each in (before, after)]
    difference = f"{statistics.mean(pairs) / mean:+.1%} +- {error / mean:.1%}"
    return [f"{entry['share']:.0%}", *means, difference, str(len(pairs))]


def _both(ttft: dict[str, float]) -> str:
    return f"{1e3 * ttft['mean']:.0f} / {1e3 * ttft['p99']:.0f}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--preset", default="h100:llama-3.1-8b", help="(default: %(default)s)")
    parser.add_argument("--links", default=",".join(LINKS), help="(default: %(default)s)")
    parser.add_argument("--trace", help="a trace in Mooncake's format instead of a made-up one")
    parser.add_argument("--limit", type=int, default=1000, help="requests of the trace")
    parser.add_argument("--sessions", type=int, default=120, help="made-up conversations")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between their starts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", help="capacities, as shares (default: 0.2,0.5,1)")
    parser.add_argument("--simulated-only", action="store_true", help="without the real run")
    parser.add_argument("--measured-only", action="store_true", help="the real run alone")
    parser.add_argument("--talks", type=int, default=6, help="conversations of the real run")
    parser.add_argument("--tokens", type=int, default=2048, help="of their first prompts")
    parser.add_argument("--rounds", type=int, default=2, help="of the real run")
    options = parser.parse_args()
    options.links = [link for link in options.links.split(",") if link]
    options.shares = [float(share) for share in (options.shares or "").split(",") if share]
    options.shares = options.shares or list(SHARES)
    return options


if __name__ == "__main__":
    raise SystemExit(start(parse(), measure, tell))

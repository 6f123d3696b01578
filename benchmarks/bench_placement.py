"""Placement: what stores keep, and what that is worth in time to first token.

The real scheduler in virtual time over stores that evict and write by the very policies of real
tiers: least recently used + everything stored, against cost-aware + planned, and the steps in
between, at several shares of the working set. Requests are conversations in Mooncake's trace format
(made up, or ``--trace FILE``). Stores go behind the requests, over a direction of the link of their
own or (``-shared``, nvme) over the one that loads have. Then a small real run (placement_real.py):
one engine, one nvme tier behind a link that loads and stores share, shorter conversations of the
same kind, the same two placements at the same capacities; beside it those traces in virtual time
(placement_replay.py).

    make bench-placement
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placement_real import CHUNKS, Way, measured
from rich.console import Console
from rich.progress import track
from rigs import model_options, ratio, show, start

from cacheflow.simulation import Channel, Scenario, Synthetic, load_link, load_machine, simulate
from cacheflow.simulation.traces import BLOCK_TOKENS, load_trace, parse_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.simulation import Job

SHARES: Final = (0.2, 0.5, 1.0)
"""Capacities, as shares of the bytes of everything that is ever stored."""
LINKS: Final = ("10gbps", "25gbps", "100gbps", "10gbps-shared", "25gbps-shared", "nvme")
TURN_SECONDS: Final = 60.0
_LONGEST_SIMULATED: Final = 120_000
_LONGEST: Final = 6144
"""Tokens of a prompt of the real run."""


WAYS: Final = (
    Way("lru", "all"),
    Way("s3fifo", "all"),
    Way("cost-aware", "all"),
    Way("lru", "planned"),
    Way("cost-aware", "planned"),
)
ENDS: Final = (WAYS[0], WAYS[-1])


def conversations(sessions: int, gap: float, seed: int, longest: int) -> Iterator[str]:
    """Lines of a made-up trace: a third are single questions, the others go on for some turns,
    about a minute apart; over one of two system prompts. ``gap``: seconds between their starts;
    ``longest``: tokens of a prompt at most."""
    chance, fresh, began = random.Random(f"placement:{seed}"), count(1000), 0.0
    lines: list[tuple[float, str]] = []
    for _ in range(sessions):
        began += chance.expovariate(1 / gap)
        now, blocks = began, list(chance.choice((range(2), range(10, 14))))
        tokens = len(blocks) * BLOCK_TOKENS + round(chance.lognormvariate(8.3, 0.9))
        turns = 1 if chance.random() < 0.35 else 2 + min(12, int(chance.expovariate(0.25)))
        for _ in range(turns):
            tokens = min(tokens, longest)
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
    jobs = _jobs(options, options.sessions, options.seed)
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
                written = {"bytes": summary.written_bytes, "dropped": summary.unwritten_bytes}
                ttft[same] = {"mean": summary.ttft.mean, "p99": summary.ttft.p99, **written}
            entry[way.name] = ttft[same]
        found.append(entry)
    return found


def _jobs(
    options: argparse.Namespace, sessions: int, seed: int, longest: int = _LONGEST_SIMULATED
) -> Sequence[Job]:
    if options.trace:
        return load_trace(Path(options.trace), limit=options.limit).first()
    lines = conversations(sessions, options.gap, seed, longest)
    return list(parse_trace(lines, "conversations"))


def _traces(options: argparse.Namespace) -> list[Sequence[Job]]:
    """For the real run: one a round, of seeds that follow one another."""
    seeds = range(options.seed, options.seed + options.rounds)
    return [_jobs(options, options.talks, seed, _LONGEST * options.scale) for seed in seeds]


# -- output ------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    found: dict[str, Any] = {"preset": options.preset}
    if not options.measured_only:
        found["simulated"] = simulated(options)
    if not options.simulated_only:
        found["measured"] = await measured(options, ENDS, _traces(options))
    return found


def tell(found: dict[str, Any]) -> None:
    """Two tables."""
    if "simulated" in found:
        names = [way.name for way in WAYS]
        rows = [
            [f"{entry['link']} {entry['share']:.0%}", *(_both(entry[name]) for name in names)]
            for entry in found["simulated"]
        ]
        title = f"Mean / P99 TTFT in ms, GB written, {found['preset']}, virtual time"
        caption = "capacity: share of all that is ever stored"
        show(title, ["link, capacity", *names], rows, caption)
    if "measured" in found:
        names = [way.name for way in ENDS]
        title = "Mean TTFT in ms, measured"
        chunks = [f"chunks, {name}" for name in names]
        heads = ["capacity", *names, "difference", "simulated", "requests", *chunks]
        show(title, heads, [_paired(entry) for entry in found["measured"]], _CAPTION)


_CAPTION: Final = """difference: of the means, and the standard error of the mean of all traces
simulated: the same for the very same traces in virtual time
chunks: stored, left out by policy or tier, dropped"""


def _paired(entry: dict[str, Any]) -> list[str]:
    means = [f"{1e3 * statistics.mean(entry['ttft'][way.name]):.0f}" for way in ENDS]
    chunks = [" / ".join(str(entry["chunks"][way.name][what]) for what in CHUNKS) for way in ENDS]
    differences = [_difference(entry[run]) for run in ("ttft", "replayed")]
    return [f"{entry['share']:.0%}", *means, *differences, str(entry["turns"]), *chunks]


def _difference(ttft: dict[str, list[float]]) -> str:
    before, after = (ttft[way.name] for way in ENDS)
    mean, pairs = statistics.mean(before), [b - a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
    return f"{statistics.mean(pairs) / mean:+.1%} +- {error / mean:.1%}"


def _both(ttft: dict[str, float]) -> str:
    return f"{1e3 * ttft['mean']:.0f} / {1e3 * ttft['p99']:.0f}, {ttft['bytes'] / 1e9:.0f}"


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
    parser.add_argument("--talks", type=int, default=16, help="conversations of the real run")
    parser.add_argument("--scale", type=int, default=4, help="its requests are shorter")
    parser.add_argument("--rounds", type=int, default=2, help="traces of the real run")
    ratio_help = "compute:I/O of the real run's link (default: 1:3, a slow one)"
    parser.add_argument("--ratio", type=ratio, default=ratio("1:3"), help=ratio_help)
    options = parser.parse_args()
    options.links = [link for link in options.links.split(",") if link]
    options.shares = [float(share) for share in (options.shares or "").split(",") if share]
    options.shares = options.shares or list(SHARES)
    return options


if __name__ == "__main__":
    raise SystemExit(start(parse(), measure, tell))

"""Placement on a real engine: a small trace, each request while earlier ones are being stored.

One request after the other without a pause, as a busy server has them: what a turn stores is still
on its way to the disk when the next one loads, over one link for both. A request's KV is forgotten
once the next one has had its turn. Prints nothing.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal

from placement_replay import Replay
from rich.console import Console
from rich.progress import track
from rigs import opened

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings
from cacheflow.simulation.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.session import Session
    from cacheflow.simulation import Job
    from cacheflow.tiers.eviction import EvictionName

__all__ = ["CHUNKS", "Way", "balanced_bandwidth", "measured", "shared_link"]

CHUNKS: Final = ("stored", "skipped", "dropped")
"""What can become of a chunk that was to be saved; skipped: left out by policy or tier."""

_VOCABULARY: Final = 320
_STAGING_BYTES: Final = 16 << 20
_ANSWER: Final = 8
"""Tokens of an answer: decode, during which saving rests on a small machine."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to place."""

    eviction: EvictionName
    writes: Literal["all", "planned"]

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.eviction} + {self.writes}"


@dataclass(slots=True)
class Played:
    """What became of all turns of some runs."""

    ttft: list[float] = field(default_factory=list)
    """Means of runs, in seconds."""
    turns: int = 0
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHUNKS, 0))


async def measured(
    options: argparse.Namespace, ways: Sequence[Way], traces: Sequence[Sequence[Job]]
) -> list[dict[str, Any]]:
    """One entry a capacity: mean TTFT by way and trace, real and replayed, and chunks. Every trace
    is played all ways, in either order by turns; its capacity is a share of its own working set."""
    played: defaultdict[tuple[float, str], Played] = defaultdict(Played)
    async with opened(options) as rig:
        plays = [_prompts(jobs, options.scale) for jobs in traces]
        longest = max((prompt for prompts in plays for prompt in prompts), key=len)
        balanced = await balanced_bandwidth(rig, longest)
        bandwidth = balanced * options.ratio
        seconds = len(longest) * rig.engine.layout.token_bytes / balanced
        replay = Replay(rig, len(longest), seconds, options.ratio)
        runs = list(product(options.shares, enumerate(plays)))
        for share, (number, prompts) in track(runs, "measured", console=Console(stderr=True)):
            capacity = max(1 << 20, round(share * _working_set(rig, prompts)))
            for way in ways if (options.seed + number) % 2 == 0 else ways[::-1]:
                await _play(rig, prompts, capacity, bandwidth, way, played[share, way.name])
    return [
        {
            "share": share,
            "replayed": {
                way.name: [replay.mean(each, share, way.eviction, way.writes) for each in plays]
                for way in ways
            },
            "turns": played[share, ways[0].name].turns,
            "ttft": {way.name: played[share, way.name].ttft for way in ways},
            "chunks": {way.name: dict(played[share, way.name].chunks) for way in ways},
        }
        for share in options.shares
    ]


def _prompts(jobs: Sequence[Job], scale: int) -> list[list[int]]:
    """In the order of arrival, a token for every ``scale`` of the trace. Equal blocks are equal
    tokens, and the block that follows what a prompt ended in goes on as that one began."""
    size, seeds, ends = BLOCK_TOKENS // scale, dict[int, int](), dict[tuple[int, ...], int]()
    prompts = []
    for job in sorted(jobs, key=lambda job: job.arrival):
        ids, tokens = job.hash_ids, list[int]()
        for index, block in enumerate(ids):
            if block not in seeds:
                seeds[block] = ends.pop(ids[:index], block)
            chance = random.Random(seeds[block])
            tokens += (chance.randrange(_VOCABULARY) for _ in range(size))
        whole = job.total_tokens // BLOCK_TOKENS
        ends |= {ids[:whole]: seeds[block] for block in ids[whole:]}
        prompts.append(tokens[: job.total_tokens // scale])
    return prompts


def _working_set(rig: Rig, prompts: Sequence[Sequence[int]]) -> int:
    """Bytes of all different chunks."""
    layout = rig.engine.layout
    step = layout.chunk_tokens
    chunks = {
        hash(tuple(prompt[:stop]))
        for prompt in prompts
        for stop in range(step, len(prompt) + 1, step)
    }
    return int(len(chunks) * (layout.payload_bytes() + 4096))


async def balanced_bandwidth(rig: Rig, prompt: list[int]) -> float:
    """Bytes a second at which loading ``prompt`` takes as long as recomputing it."""
    async with CacheFlow.open(Settings(keep_costs=False), engine=rig.engine) as flow:
        for name in ("warm", "timed"):
            session, started = flow.session(name), flow.clock.now()
            async for _ in session.generate(prompt, max_new_tokens=1, save=False):
                pass
            seconds = flow.clock.now() - started
            await session.forget()  # or the next one would share its KV, and compute next to none
    return float(len(prompt) * rig.engine.layout.token_bytes / seconds)


async def _play(
    rig: Rig,
    prompts: Sequence[list[int]],
    capacity: int,
    bandwidth: float,
    way: Way,
    played: Played,
) -> None:
    """All of a trace over an empty store."""
    reports: list[Generation] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(folder, way, capacity, bandwidth)
        async with CacheFlow.open(settings, engine=rig.engine) as flow:
            previous: Session | None = None
            for prompt in prompts:
                session, report = flow.session(f"{len(reports)}"), Generation()
                async for _ in session.generate(prompt, max_new_tokens=_ANSWER, report=report):
                    pass
                reports.append(report)
                if previous is not None:
                    await previous.forget()
                previous = session
            await flow.flush()
    played.ttft.append(statistics.mean(report.ttft_seconds or 0.0 for report in reports))
    played.turns += len(reports)
    for report in reports:
        for saved in (report.saved or {}).values():
            for what in CHUNKS:
                played.chunks[what] += getattr(saved, what)


def shared_link(folder: str, bandwidth: float, **settings: Any) -> TierSettings:
    """An nvme tier behind a link that loads and stores share."""
    inner = {"inner": "nvme", "inner_options": {"path": folder, "fsync": False}}
    options = {**inner, "bandwidth": bandwidth, "latency": 1e-3, "duplex": False}
    return TierSettings.model_validate(
        {"name": "disk", "backend": "throttled", "options": options, **settings}
    )


def _settings(folder: str, way: Way, capacity: int, bandwidth: float) -> Settings:
    kept = {"capacity_bytes": capacity, "eviction": way.eviction, "lease_seconds": 1.0}
    tier = shared_link(folder, bandwidth, **kept)
    # What waits to be stored is read where it waits: much of that would be a tier of its own.
    return Settings(
        tiers=(tier,), keep_costs=False, write_policy=way.writes, staging_bytes=_STAGING_BYTES
    )

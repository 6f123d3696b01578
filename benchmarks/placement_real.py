"""Placement on a real engine: conversations that come back while earlier turns are being stored.

One request after the other without a pause, as a busy server has them: what a turn stores is still
on its way to the disk when the next one loads, over one link for both. A conversation's KV is
forgotten once another one has had its turn. Prints nothing.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.progress import track
from rigs import opened

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.session import Session
    from cacheflow.tiers.eviction import EvictionName

__all__ = ["CHUNKS", "Way", "balanced_bandwidth", "measured", "shared_link"]

CHUNKS: Final = ("stored", "skipped", "dropped")
"""What can become of a chunk that was to be saved; skipped: left out by policy or tier."""

_VOCABULARY: Final = 320
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
    """Of turns that had a turn before them, in seconds."""
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHUNKS, 0))


async def measured(options: argparse.Namespace, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """One entry a capacity: TTFT and chunks by way. Every round plays the same turns both ways, in
    either order by turns."""
    played: defaultdict[tuple[float, str], Played] = defaultdict(Played)
    async with opened(options) as rig:
        turns = _turns(options)
        longest = max((prompt for _, prompt in turns), key=len)
        bandwidth = await balanced_bandwidth(rig, longest) * options.ratio
        working_set = _working_set(rig, turns)
        runs = list(product(options.shares, range(options.rounds)))
        for share, number in track(runs, "measured", console=Console(stderr=True)):
            for way in ways if number % 2 == 0 else ways[::-1]:
                capacity = max(1 << 20, round(share * working_set))
                await _play(rig, turns, capacity, bandwidth, way, played[share, way.name])
    return [
        {
            "share": share,
            "ttft": {way.name: played[share, way.name].ttft for way in ways},
            "chunks": {way.name: dict(played[share, way.name].chunks) for way in ways},
        }
        for share in options.shares
    ]


def _turns(options: argparse.Namespace) -> list[tuple[int, list[int]]]:
    """``(conversation, prompt)`` in the order of arrival; no conversation has two in a row."""
    chance, last = random.Random(options.seed), -1
    prompts: dict[int, list[int]] = {talk: [] for talk in range(options.talks)}
    left = dict.fromkeys(prompts, options.turns)
    turns = []
    while any(left.values()):
        # Those with most turns left go first of all that may: else one would be left alone.
        most = max(count for talk, count in left.items() if talk != last)
        able = [talk for talk, n in left.items() if n and n >= most - 1 and talk != last]
        if not able:
            break
        last = chance.choice(able)
        left[last] -= 1
        more = options.tokens if not prompts[last] else options.tokens // 4
        prompts[last] += (chance.randrange(_VOCABULARY) for _ in range(more))
        turns.append((last, list(prompts[last])))
    return turns


def _working_set(rig: Rig, turns: Sequence[tuple[int, list[int]]]) -> int:
    longest = {talk: len(prompt) for talk, prompt in turns}
    layout = rig.engine.layout
    chunks = sum(tokens // layout.chunk_tokens for tokens in longest.values())
    return int(chunks * (layout.payload_bytes() + 4096))


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
    turns: Sequence[tuple[int, list[int]]],
    capacity: int,
    bandwidth: float,
    way: Way,
    played: Played,
) -> None:
    """All turns over an empty store."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(folder, way, capacity, bandwidth)
        async with CacheFlow.open(settings, engine=rig.engine) as flow:
            seen: set[int] = set()
            previous: Session | None = None
            for talk, prompt in turns:
                session, report = flow.session(f"{talk}"), Generation()
                async for _ in session.generate(prompt, max_new_tokens=_ANSWER, report=report):
                    pass
                if talk in seen:
                    played.ttft.append(report.ttft_seconds or 0.0)
                seen.add(talk)
                reports.append(report)
                if previous is not None:
                    await previous.forget()
                previous = session
            await flow.flush()
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
    return Settings(tiers=(tier,), keep_costs=False, write_policy=way.writes)

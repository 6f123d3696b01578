"""One life of the process that serves an agent: bench_agents.py starts it, ends it, starts another.

Reads what to do as JSON from standard input and writes what came of it to standard output, a JSON
object a turn and one at the end. Knows nothing of other lives but the context it is given, as a
server that was restarted knows nothing but what is in its store and in the request.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import uvloop
from agent_pauses import branches, pauses
from agent_script import Script

from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LIVE", "OPENING", "Life", "live", "policy_of"]

Say: TypeAlias = "Callable[[dict[str, Any]], None]"

LIVE: Final = "CacheFlow"
"""The way whose answers make the conversation go on, and are stored."""
OPENING: Final = 768
COMPARED: Final = 8
"""Tokens of an answer of the other ways."""
_CALIBRATIONS: Final = 3
_DEADLINE: Final = 300.0
"""Seconds that one load may take: the link is slow on purpose."""
_POLICIES: Final = {LIVE: "adaptive", "recompute": "recompute", "load": "load"}


@dataclass(frozen=True, slots=True)
class Life:
    """What one process is to do."""

    model: str
    threads: int
    store: str
    first: int
    """Turns from here on; ``stop`` is the first of the next life."""
    stop: int
    turns: int
    """Of the whole conversation."""
    ways: tuple[str, ...]
    """How each turn is answered, one after the other in changing order."""
    tokens: list[int]
    """The context when this life begins, the last answer at its end."""
    chunk: int
    """Tokens of the stored unit."""
    bandwidth: float | None = None
    """Of the link in front of the store, bytes a second. None: the disk itself."""
    forget: bool = True
    """After each answer, as a server does that needs the memory while the tool runs."""
    answers: tuple[tuple[int, ...], ...] = ()
    """By turn: where given, no way makes the conversation go on, but these do."""
    restores: tuple[float, ...] = ()
    """By turn: where more than 0, pauses are measured by this restore's seconds."""
    branches: int = 0
    """So many go on from the last context, resumed together."""
    calibrate: int | None = None
    """Recompute the prompt of this turn at the end, and say how long it takes."""

    @classmethod
    def from_json(cls, text: str) -> Life:
        """As ``dataclasses.asdict`` and ``json.dumps`` wrote it."""
        given = json.loads(text)
        return cls(**{field.name: given[field.name] for field in fields(cls)})


def policy_of(way: str) -> str:
    """The policy that a way of answering stands for."""
    return _POLICIES[way]


class _Server:
    """An engine and its store, for as long as this process lives."""

    def __init__(self, life: Life, engine: Any, flow: CacheFlow, say: Say) -> None:
        self.life = life
        self.say = say
        self.engine = engine
        self.flow = flow
        self.script = Script(engine.tokenizer, OPENING, life.turns)
        self.tokens = list(life.tokens)
        self.prompts: dict[int, list[int]] = {}

    async def run(self) -> None:
        for turn in range(self.life.first, self.life.stop):
            self.say(await self._turn(turn))
        end: dict[str, Any] = {"tokens": self.tokens}
        if self.life.branches:
            results = [self.script.result(1 + i) for i in range(self.life.branches)]
            end["forked"] = await branches(self.flow, self.tokens, results)
        if self.life.calibrate is not None:
            end["calibrated"] = await self._calibrate(self.prompts[self.life.calibrate])
        self.say(end)

    async def _turn(self, turn: int) -> dict[str, Any]:
        prompt = self.tokens + self.script.result(turn) if turn else self.script.opening()
        self.prompts[turn] = prompt
        ways, found = self.life.ways, {}
        answer: list[int] = []
        first = turn % len(ways) if ways else 0
        for way in (*ways[first:], *ways[:first]) if ways else ():
            # The first turn finds nothing stored: there is nothing to compare.
            if turn or way == LIVE:
                made, found[way] = await self._answer(prompt, way)
                answer = made if way == LIVE else answer
        paused = {}
        if self.life.restores and (seconds := self.life.restores[turn]):
            paused = await pauses(self.flow, self.tokens, prompt, seconds)
        if self.life.answers:
            answer = list(self.life.answers[turn])
        self.tokens = prompt + answer
        return {
            "turn": turn,
            "context": len(prompt),
            "answer": answer,
            "ways": found,
            "pauses": paused,
        }

    async def _answer(self, prompt: Sequence[int], way: str) -> tuple[list[int], dict[str, Any]]:
        """Full and stored where the conversation is to go on with it, else its beginning only."""
        goes_on = way == LIVE and not self.life.answers
        session, report = self.flow.session("agent" if goes_on else way), Generation()
        made = [
            token
            async for token in session.generate(
                prompt,
                max_new_tokens=self._length(len(prompt)) if goes_on else COMPARED,
                policy=policy_of(way),
                save=goes_on,
                report=report,
            )
        ]
        await self.flow.flush()
        if self.life.forget:
            await session.forget()
        return made, self._figures(report, len(prompt), made)

    def _length(self, prompt: int) -> int:
        """Tokens of an answer that ends one token behind a chunk: what is not stored of a context
        is then the tool's next result, as it is where answers are long and results short."""
        chunk: int = self.engine.layout.chunk_tokens
        missing = -(prompt - 1) % chunk
        return missing if missing > chunk // 4 else missing + chunk

    def _figures(self, report: Generation, prompt: int, made: list[int]) -> dict[str, Any]:
        restoration = report.restoration
        assert restoration is not None
        return {
            "ttft_s": report.ttft_seconds,
            "restored_s": restoration.restored_seconds,
            "recomputed_share": restoration.recomputed_share,
            "failed_loads": restoration.failed_loads,
            "cached_tokens": report.cached_tokens,
            "suffix": prompt - report.cached_tokens,
            "begins": made[:COMPARED],
        }

    async def _calibrate(self, prompt: Sequence[int]) -> dict[str, float]:
        """Seconds of recomputing what can be restored of a prompt, and its bytes."""
        seconds, chunks, layout = [], 0, self.engine.layout
        for _ in range(_CALIBRATIONS):
            await self.flow.forget()
            report = Generation()
            async for _token in self.flow.session("calibration").generate(
                prompt, max_new_tokens=1, policy="recompute", save=False, report=report
            ):
                pass
            assert report.restoration is not None
            chunks = report.restoration.prefix_tokens // layout.chunk_tokens
            seconds.append(report.restoration.restored_seconds)
        return {"seconds": statistics.median(seconds), "nbytes": chunks * layout.payload_bytes()}


def settings_of(life: Life) -> Settings:
    """The store in its folder, behind the link if there is one; costs are kept beside it."""
    disk = {"path": life.store}
    tier = TierSettings(name="disk", backend="nvme", options=disk)
    if life.bandwidth is not None:
        link = {"inner": "nvme", "inner_options": disk, "bandwidth": life.bandwidth}
        tier = TierSettings(name="link", backend="throttled", options=link)
    beside = Path(life.store).parent
    return Settings(tiers=(tier,), cache_dir=beside, keep_costs=True, load_deadline=_DEADLINE)


async def live(life: Life, say: Say) -> None:
    """From opening the model to closing the store; ``say`` gets each turn, and the end."""
    from cacheflow.plugins.transformers import TransformersEngine

    engine = await TransformersEngine.open_model(
        life.model, dtype="float32", threads=life.threads, chunk_tokens=life.chunk
    )
    try:
        async with CacheFlow.open(settings_of(life), engine=engine) as flow:
            await _Server(life, engine, flow, say).run()
    finally:
        await engine.aclose()


def main() -> None:
    """Read, live, end."""
    # As ``cacheflow bench`` does: spinning OpenMP threads would take the core that I/O needs.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    life = Life.from_json(sys.stdin.read())
    uvloop.run(live(life, lambda what: print(json.dumps(what), flush=True)))


if __name__ == "__main__":
    main()

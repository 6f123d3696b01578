"""The demo's runs: a conversation, its loss, and its return by three ways over several links.

Uses the public session facade only, so that what is measured is what an agent would get. Knows
nothing of how results are shown.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cacheflow.cli.demo_proof import Proof, cell_digests
from cacheflow.cli.demo_report import ADAPTIVE, Link, Row, cell_seconds, drift, fluid
from cacheflow.cli.demo_screen import cells_in
from cacheflow.cli.demo_talk import FINAL_QUESTION, Talk, turns
from cacheflow.costs import ComputeModel
from cacheflow.metrics.timeline import Timeline
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings, TierSettings
from cacheflow.types import RestoreEnded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from cacheflow.cli.demo_screen import Screen
    from cacheflow.restore import Restoration
    from cacheflow.types import Event, KVLayout

__all__ = ["Demo", "Result"]

_ANSWER: Final = 8
"""Tokens of each answer: of the conversation's turns, and compared after each way."""
_FULL_ANSWER: Final = 48
"""Tokens of the answer that is shown."""
_RAW_ROUNDS: Final = 3
"""The disk itself is over in moments, so take the median of a few interleaved rounds."""
_DEADLINE: Final = 300.0
"""Seconds that one load may take: the links are slow on purpose."""


@dataclass(frozen=True, slots=True)
class Result:
    """One answer after one restore, and everything that was observed meanwhile."""

    ttft: float
    restoration: Restoration
    tokens: tuple[int, ...]
    digests: tuple[bytes, ...]
    """Of every (chunk, layer) cell of the prefix, chunk by chunk."""
    events: tuple[Event, ...]


@dataclass
class Demo:
    """Runs on ``engine`` with the store in the folder ``store``; one thing at a time."""

    engine: Any
    store: Path
    screen: Screen
    prompt: list[int] = field(default_factory=list)
    """Of the turn that arrives after the KV is gone."""
    reference: Result | None = None
    """The run that never forgot."""
    recompute: Result | None = None
    proof: Proof | None = None

    def __post_init__(self) -> None:
        self.talk = Talk(self.engine.tokenizer)
        self._costs = ComputeModel(*self.engine.layer_flops)
        self._events: list[Event] = []
        self._advance: Callable[[float], None] | None = None

    async def converse(self, tokens: int) -> None:
        """Hold the conversation, store its KV, and answer the next turn without forgetting."""
        async with self._flow(Link("raw", None)) as flow:
            for number, turn in enumerate(turns(tokens), 1):
                before = len(self.talk.tokens)
                prompt = self.talk.read(turn)
                what = f"turn {number}: the agent reads {len(prompt) - before} tokens"
                # A store of an earlier demo is overwritten, not used: the history is computed.
                result = await self._answer(flow, prompt, what, "recompute", save=True)
                self.talk.answered(result.tokens)
            await flow.flush()
            self.prompt = self.talk.ask(FINAL_QUESTION)
            what = "the next turn, nothing forgotten: the reference"
            self.reference = await self._answer(
                flow, self.prompt, what, ADAPTIVE, answer=_FULL_ANSWER
            )
            self.proof = await Proof.of(flow, self.prompt, self.reference.digests)

    async def three_ways(self, link: Link, tell: Callable[[Row], None]) -> Timeline:
        """Recompute only, load only and CacheFlow over ``link``; ``tell`` gets each as it is done.

        Returns what happened in the run from both ends.
        """
        recompute = await self._recompute_only()
        tell(self._row(link, recompute))
        async with self._flow(link) as flow:
            loads, boths = [], []
            for left in reversed(range(_RAW_ROUNDS if link.ratio is None else 1)):
                loads.append(await self._restore(flow, "load", f"{link.name}: load only"))
                load = _median(loads)
                if not left:
                    tell(self._row(link, load))
                boths.append(await self._restore(flow, ADAPTIVE, f"{link.name}: from both ends"))
            both = _median(boths)
            tell(self._row(link, both, (recompute, load)))
        return _timeline(both.events)

    async def stream(self, link: Link, tell: Callable[[str], None]) -> bool:
        """Forget again, restore from both ends, and ``tell`` the answer's text as it is made.

        Returns whether its tokens are those of the run that never forgot.
        """
        assert self.reference is not None
        made: list[int] = []
        said = ""
        async with self._flow(link) as flow:
            async for token in flow.session("agent").generate(
                self.prompt,
                max_new_tokens=_FULL_ANSWER,
                stop_tokens=self.talk.stop,
                policy=ADAPTIVE,
                save=False,
            ):
                made.append(token)
                text = self.talk.text(made)
                tell(text[len(said) :])
                said = text
        return tuple(made) == self.reference.tokens

    @property
    def prefix_bytes(self) -> int:
        """Bytes that load-only has to move."""
        layout: KVLayout = self.engine.layout
        return self._prefix_tokens // layout.chunk_tokens * layout.payload_bytes()

    @property
    def _prefix_tokens(self) -> int:
        chunk: int = self.engine.layout.chunk_tokens
        return (len(self.prompt) - 1) // chunk * chunk

    async def _recompute_only(self) -> Result:
        """It does not depend on the link, so it is run once."""
        if self.recompute is None:
            async with self._flow(Link("raw", None)) as flow:
                self.recompute = await self._restore(flow, "recompute", "recompute only")
        return self.recompute

    async def _restore(self, flow: CacheFlow, policy: str, what: str) -> Result:
        try:
            return await self._answer(flow, self.prompt, what, policy)
        finally:
            await flow.forget()

    async def _answer(
        self,
        flow: CacheFlow,
        prompt: Sequence[int],
        what: str,
        policy: str,
        *,
        answer: int = _ANSWER,
        save: bool = False,
    ) -> Result:
        session, report = flow.session("agent"), Generation()
        cells = (len(prompt) - session.resident_tokens) * self.engine.layout.num_layers
        self._events = []
        with self.screen.step(what, cells) as self._advance:
            made = [
                token
                async for token in session.generate(
                    prompt,
                    max_new_tokens=answer,
                    stop_tokens=self.talk.stop,
                    policy=policy,
                    save=save,
                    report=report,
                )
            ]
        self._advance = None
        restoration, ttft = report.restoration, report.ttft_seconds
        assert restoration is not None
        assert ttft is not None
        events = tuple(self._events)
        request = restoration.request_id
        digests = (
            await cell_digests(self.engine, request, self._prefix_tokens) if self.prompt else ()
        )
        return Result(ttft, restoration, tuple(made), digests, events)

    @asynccontextmanager
    async def _flow(self, link: Link) -> AsyncIterator[CacheFlow]:
        disk: dict[str, Any] = {"path": str(self.store)}
        tier = TierSettings(name="disk", backend="nvme", options=disk)
        if link.ratio is not None:
            assert self.recompute is not None
            seconds = self.recompute.restoration.restored_seconds
            bandwidth = link.bandwidth(self.prefix_bytes, seconds)
            options = {"inner": "nvme", "inner_options": disk, "bandwidth": bandwidth}
            tier = TierSettings(name="link", backend="throttled", options=options)
        settings = Settings(tiers=(tier,), load_deadline=_DEADLINE)
        async with CacheFlow.open(
            settings, engine=self.engine, observer=self._observe, compute=self._costs
        ) as flow:
            yield flow

    def _observe(self, event: Event) -> None:
        self._events.append(event)
        if self._advance is not None:
            self._advance(cells_in(event, self.engine.layout.chunk_tokens))

    def _row(self, link: Link, run: Result, single: tuple[Result, Result] | None = None) -> Row:
        assert self.reference is not None
        assert self.recompute is not None
        assert self.proof is not None
        restoration = run.restoration
        speedup = efficiency = moved = None
        if single is not None:
            moved = drift(cell_seconds(self.recompute.events), cell_seconds(run.events))
            speedup = min(way.ttft for way in single) / run.ttft
            efficiency = self._fluid(*single) / restoration.restored_seconds
        seconds = self.recompute.restoration.restored_seconds
        return Row(
            link=link.name,
            bandwidth=link.bandwidth(self.prefix_bytes, seconds),
            way=restoration.policy,
            ttft=run.ttft,
            restored=restoration.restored_seconds,
            recomputed_share=restoration.recomputed_share,
            failed_loads=restoration.failed_loads,
            tokens_identical=run.tokens == self.reference.tokens[: len(run.tokens)],
            exact_cells=self.proof.exact(run.digests, self.recompute.digests),
            cells=len(run.digests),
            canonical_identical=self.proof.canonical_identical(run.digests),
            speedup=speedup,
            efficiency=efficiency,
            drift=moved,
        )

    def _fluid(self, recompute: Result, load: Result) -> float:
        tiles = self.engine.grid.split(0, recompute.restoration.prefix_tokens)
        cells = cell_seconds(recompute.events)
        seconds = load.restoration.restored_seconds
        return fluid(cells, seconds, tiles, self.engine.layout.num_layers)


def _median(runs: Sequence[Result]) -> Result:
    return sorted(runs, key=lambda run: run.ttft)[len(runs) // 2]


def _timeline(events: Sequence[Event]) -> Timeline:
    arrival = next(event.arrival for event in events if isinstance(event, RestoreEnded))
    timeline = Timeline(origin=arrival)
    for event in events:
        timeline(event)
    return timeline

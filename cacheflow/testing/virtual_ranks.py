"""Tensor-parallel ranks in virtual time: real schedulers, real agreement, modelled costs.

Every rank has its own links and finds its own cells; compute takes all of them and goes on only as
they agree. Checks as it goes that no rank refuses what was agreed, and keeps what each computed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.distributed import Act, Member, agree, combine
from cacheflow.scheduling import JointScheduler, load_policy
from cacheflow.types import Claim, ComputeDone, Offering

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.testing.virtual import Link
    from cacheflow.types import Coverage, Load, RequestSpec, Tile

__all__ = ["VirtualRank", "VirtualRanks"]

_VAIN: Final = 1000
"""Exchanges in one instant, or timers without an event between them, after which nothing will
change any more."""


@dataclass(slots=True)
class VirtualRank:
    """One rank: ``computed`` is what it pushed through layers, in order, as ``(request, first
    token, layer)``; ``written`` who made each of its cells, by ``(request, tile, layer)``."""

    scheduler: JointScheduler
    member: Member
    links: Mapping[str, Link]
    computed: list[tuple[str, int, int]] = field(default_factory=list)
    written: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)
    restored_at: dict[str, float] = field(default_factory=dict)


class VirtualRanks:
    """``links``: of each rank. ``layer_seconds``: what all ranks take for a layer of a tile;
    ``exchange_seconds``: what an agreement takes."""

    def __init__(
        self,
        links: Sequence[Mapping[str, Link]],
        layer_seconds: Callable[[Tile], float],
        *,
        linear: float = 1.0,
        attention: float = 1e-4,
        exchange_seconds: float = 0.0,
    ) -> None:
        self.clock = ManualClock()
        self.ranks = [self._rank(each, linear, attention) for each in links]
        self.finished_at: dict[str, float] = {}
        self.exchanges = 0
        self._layer_seconds = layer_seconds
        self._exchange_seconds = exchange_seconds
        self._numbers = count()
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._computing = False
        self._open: set[str] = set()

    def _rank(self, links: Mapping[str, Link], linear: float, attention: float) -> VirtualRank:
        scheduler = JointScheduler(ComputeModel(linear, attention), self.clock)
        return VirtualRank(scheduler, Member(scheduler), links)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` when the clock reads ``when``."""
        heapq.heappush(self._events, (when, next(self._order), action))

    def arrive(
        self, spec: RequestSpec, found: Sequence[Sequence[Coverage]], policy: str = "adaptive"
    ) -> None:
        """At ``spec.arrival`` the ranks meet over a request of which rank ``r`` found
        ``found[r]``."""
        self._open.add(spec.id)
        self.at(spec.arrival, lambda: self._admit(spec, found, policy))

    def _admit(self, spec: RequestSpec, found: Sequence[Sequence[Coverage]], policy: str) -> None:
        number = next(self._numbers)
        offers = [Offering(tuple(each)) for each in found]
        for r, rank in enumerate(self.ranks):
            rank.scheduler.admit(spec, load_policy(policy))
            for coverage in combine(offers, r).coverage:
                rank.scheduler.extend_coverage(spec.id, coverage)
            rank.member.join(number, spec.id)

    def run(self) -> None:
        """Until every request is finished; raises if nothing can happen any more."""
        vain = 0
        while self._open:
            self._begin()
            self._note()
            if not self._open:
                return
            timers = [rank.scheduler.wake_at(self.clock.now()) for rank in self.ranks]
            timer = max(min(timers), self.clock.now() + 1e-4)
            if self._events and (self._computing or self._events[0][0] <= timer):
                when, _, action = heapq.heappop(self._events)
                self.clock.advance(max(0.0, when - self.clock.now()))
                action()
                vain = 0
                continue
            vain += 1
            if vain > _VAIN or timer == float("inf"):
                raise RuntimeError(f"stuck at {self.clock.now()}: {self._open}")
            self.clock.advance(timer - self.clock.now())

    def settle(self) -> None:
        """Let loads that compute has overtaken end; nothing is begun."""
        while self._events:
            when, _, action = heapq.heappop(self._events)
            self.clock.advance(max(0.0, when - self.clock.now()))
            action()

    # -- what can begin --------------------------------------------------------------------------

    def _begin(self) -> None:
        for _ in range(_VAIN):
            if self._computing:
                break
            for rank in self.ranks:
                self._take_work(rank)
            if not self._exchange():
                break
        else:
            raise RuntimeError("the ranks ask each other for ever")
        for rank in self.ranks:
            for name in rank.links:
                while (load := rank.scheduler.next_load(name, self.clock.now())) is not None:
                    self._start(rank, load)

    def _take_work(self, rank: VirtualRank) -> None:
        if rank.member.pending is None:
            batch = rank.scheduler.next_compute(self.clock.now())
            rank.member.pending = None if batch is None else batch.work[0]

    def _exchange(self) -> bool:
        """One agreement; whether another one can follow at once."""
        self.exchanges += 1
        decision = agree([rank.member.vote() for rank in self.ranks])
        outcomes = [rank.member.heed(decision) for rank in self.ranks]
        for rank, outcome in zip(self.ranks, outcomes, strict=True):
            if outcome.give_back and rank.member.pending is not None:
                work, rank.member.pending = rank.member.pending, None
                rank.scheduler.computed(ComputeDone(work, work.first_layer, ()))
        if decision.act is Act.RUN:
            assert all(outcome.run == decision.layers for outcome in outcomes)
            self._computing = True
            self._layer(decision.layers, 0)
        return decision.act is not Act.NOTHING or any(outcome.news for outcome in outcomes)

    def _layer(self, layers: int, done: int) -> None:
        works = [rank.member.pending for rank in self.ranks]
        assert all(work is not None for work in works)
        if done == layers:
            self._end(layers)
            return
        for rank, work in zip(self.ranks, works, strict=True):
            assert work is not None
            layer = work.first_layer + done
            answer = rank.scheduler.claim(work, layer)
            assert answer is not Claim.REFUSED, f"refused what was agreed: {work}, layer {layer}"
            rank.computed.append((work.request_id, work.tile.start, layer))
            if answer is Claim.WRITE and not work.is_suffix:
                self._write(rank, work.request_id, work.tile.index, layer, "recompute")
        assert works[0] is not None
        seconds = self._layer_seconds(works[0].tile)
        seconds += self._exchange_seconds if done == 0 else 0.0
        self.at(self.clock.now() + seconds, lambda: self._layer(layers, done + 1))

    def _end(self, layers: int) -> None:
        self._computing = False
        for rank in self.ranks:
            work, rank.member.pending = rank.member.pending, None
            assert work is not None
            rank.scheduler.computed(ComputeDone(work, work.first_layer + layers, ()))

    def _write(self, rank: VirtualRank, request: str, tile: int, layer: int, source: str) -> None:
        rank.written.setdefault((request, tile, layer), []).append(source)

    def _start(self, rank: VirtualRank, load: Load) -> None:
        link = rank.links[load.channel]
        outcome = link.outcome(load)
        if outcome is None:
            return
        done = link.finish(load.nbytes, self.clock.now())
        land, lose = self._land, self.lose
        self.at(done, (lambda: land(rank, load)) if outcome else (lambda: lose(rank, load)))

    def _land(self, rank: VirtualRank, load: Load) -> None:
        granted = rank.scheduler.commit(load)
        for layer in load.layers:
            if granted >> layer & 1:
                self._write(rank, load.request_id, load.tile, layer, load.channel)
        rank.scheduler.loaded(load, granted, self.clock.now())

    def lose(
        self,
        rank: VirtualRank,
        load: Load,
        chunks: Sequence[int] | None = None,
        *,
        late: bool = False,
    ) -> None:
        """``load`` fails on one rank, for all of its chunks or some."""
        lost = load.chunks if chunks is None else chunks
        rank.scheduler.failed(load, self.clock.now(), chunks=lost, late=late)

    # -- ends ------------------------------------------------------------------------------------

    def _note(self) -> None:
        now = self.clock.now()
        for request in list(self._open):
            if not all(self._knows(rank, request) for rank in self.ranks):
                continue
            for rank in self.ranks:
                if request not in rank.restored_at and rank.scheduler.restored(request):
                    rank.restored_at[request] = now
            ends = [rank.scheduler.finished(request) for rank in self.ranks]
            if not self._computing and any(ends):
                assert all(ends), "one rank is done and another is not"
                self._finish(request)

    def _knows(self, rank: VirtualRank, request: str) -> bool:
        return bool(rank.scheduler.family(request))

    def _finish(self, request: str) -> None:
        self.finished_at[request] = self.clock.now()
        self._open.remove(request)
        for rank in self.ranks:
            rank.member.leave(request, finished=True)
            rank.scheduler.remove(request)

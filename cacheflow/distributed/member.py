"""One rank's side of an agreement: what it votes, and what a decision means for it.

Sits between the rank's scheduler and whoever exchanges votes. Synchronous; whoever calls it from
several threads holds a lock around each call. Knows no transport and computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.distributed.agreement import Act, Decision, Need, Proposal, Vote, Work

if TYPE_CHECKING:
    from cacheflow.types import TileWork

__all__ = ["Asked", "Member", "Outcome"]

_MOST_NEEDS: Final = 64
"""Needs in one vote; the rest follow with the next."""


class Asked(Protocol):
    """What agreement needs of a scheduler; :class:`cacheflow.scheduling.JointScheduler` has it."""

    def ask(self, request_id: str, start: int, layers: int, *, now: bool = False) -> None: ...
    def set_aside(self, request_id: str, starts: frozenset[int]) -> bool: ...
    def reach(self, work: TileWork) -> tuple[int, int]: ...
    def needs(self, request_id: str) -> list[tuple[int, int]]: ...
    def blocked(self, request_id: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What this rank does after a decision."""

    run: int = 0
    """Layers of the pending work to compute now (0: none)."""
    give_back: bool = False
    """The pending work goes back to the scheduler undone, for something else comes first."""
    calls: tuple[int, ...] = ()
    """Calls to make, one after another."""
    news: bool = False
    """The scheduler was told something: it may hand out other work now."""


@dataclass(slots=True)
class Member:
    """``pending``: work that the scheduler has handed out and that waits for an agreement."""

    scheduler: Asked
    pending: TileWork | None = None
    calls: list[int] = field(default_factory=list)
    """In the order in which they were made."""
    _requests: dict[int, str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)

    def join(self, number: int, request_id: str) -> None:
        """The ranks have met over a request; it is being restored from now on."""
        self._requests[number] = request_id
        self._numbers[request_id] = number

    def leave(self, request_id: str, *, finished: bool) -> None:
        """It is restored, or given up here; then the others hear of it."""
        number = self._numbers.pop(request_id, None)
        if number is None:
            return
        del self._requests[number]
        if not finished:
            self._gone.add(number)

    def give_up(self) -> list[str]:
        """Leave every request without a word to the others; which these were."""
        left = list(self._numbers)
        self._requests, self._numbers, self._gone = {}, {}, set()
        return left

    def knows(self, request_id: str) -> bool:
        """Whether the request is being restored."""
        return request_id in self._numbers

    def named(self, number: int) -> str | None:
        """The request of that number, if it is being restored here."""
        return self._requests.get(number)

    @property
    def is_active(self) -> bool:
        """Whether others may want something of this rank at any time."""
        return bool(self._requests or self._gone)

    def vote(self) -> Vote:
        """What this rank says now."""
        blocked: list[tuple[int, int]] = []
        needs: list[Need] = []
        for number, request in self._requests.items():
            blocked += [(number, start) for start in self.scheduler.blocked(request)]
            needs += [(number, *need) for need in self.scheduler.needs(request)]
        return Vote(
            calls=tuple(sorted(self.calls)),  # of too many, all ranks say the same ones
            proposal=self._proposal(),
            blocked=tuple(blocked),
            needs=tuple(needs[:_MOST_NEEDS]),
            gone=tuple(sorted(self._gone)),
        )

    def _proposal(self) -> Proposal | None:
        if self.pending is None or self.pending.request_id not in self._numbers:
            return None
        want, able = self.scheduler.reach(self.pending)
        return Proposal(self._work(self.pending), want, able)

    def heed(self, decision: Decision) -> Outcome:
        """What the decision that the votes made means here."""
        news = bool(decision.needs)
        for number, start, layers in decision.needs:
            self._ask(number, start, layers)
        for number, request in self._requests.items():
            starts = frozenset(start for n, start in decision.blocked if n == number)
            news |= self.scheduler.set_aside(request, starts)
        self._gone -= set(decision.gone)
        if decision.act is Act.CALL:
            self.calls = [call for call in self.calls if call not in decision.calls]
            return Outcome(calls=decision.calls, news=news)
        mine = None if self.pending is None else self._work(self.pending)
        work = decision.work
        if work is None:
            # What was given up here meanwhile is never going to be agreed upon.
            waits = mine is not None and (mine[0] < 0 or (mine[0], mine[2]) in decision.blocked)
            return Outcome(give_back=waits, news=news or waits)
        self._ask(work[0], work[2], work[3] + decision.layers, now=True)
        if decision.act is Act.RUN:
            return Outcome(run=decision.layers, news=news)
        return Outcome(give_back=mine is not None and mine != work, news=True)

    def _ask(self, number: int, start: int, layers: int, *, now: bool = False) -> None:
        request = self._requests.get(number)
        if request is not None:
            self.scheduler.ask(request, start, layers, now=now)

    def _work(self, work: TileWork) -> Work:
        number = self._numbers.get(work.request_id, -1)
        return number, work.is_suffix, work.tile.start, work.first_layer

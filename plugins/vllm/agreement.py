"""One report out of those of several tensor-parallel ranks: what all of them can answer for.

Each rank loads and stores its own heads, so a block is there when it is there on all of them, its
loads have failed when one rank's have, and its pins are needed until the last rank has said that
they are not. Belongs to the scheduler's thread; pure bookkeeping. A rank that says nothing in a
step has nothing to say, so what is found and how far it is needs no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from cacheflow.plugins.vllm.records import Found, Progress, Report, SaveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Agreement"]

T = TypeVar("T")


class _Roll:
    """Who has said something of each number, while not all have."""

    def __init__(self, ranks: int) -> None:
        self._waited_for: Final = set(range(ranks))
        self._heard: dict[int, set[int]] = {}

    def say(self, rank: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._heard.setdefault(number, set()).add(rank)

    def take_complete(self) -> list[int]:
        """What everybody has said by now, told once."""
        complete = [n for n, ranks in self._heard.items() if ranks >= self._waited_for]
        for number in complete:
            del self._heard[number]
        return complete

    def drop(self, rank: int) -> None:
        """It will say nothing any more."""
        self._waited_for.discard(rank)


class Agreement:
    """Of the ranks ``0 .. ranks - 1`` of one engine."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ended = _Roll(ranks)
        self._copied = _Roll(ranks)
        self._saves = _Roll(ranks)
        self._unstored: set[int] = set()
        """Saves that one rank at least has not stored."""
        self._by_layer: dict[int, bool] = {}
        self._lost: set[int] = set()

    @property
    def all_lost(self) -> bool:
        """Nobody's storage is alive: nothing more will be told."""
        return len(self._lost) == self._ranks

    def merge(self, reports: Mapping[int, Report]) -> tuple[Report, dict[int, int]]:
        """What a step's ``reports`` (rank -> its own) come to; also, for restores of which some
        rank has found more at the top than others, where that ends (``Orders.tops``)."""
        for rank, report in reports.items():
            if report.lost:
                self._drop(rank)
            self._hear(rank, report)
        found = _common(reports, self._ranks)
        tops = {
            restore: agreed.top
            for restore, agreed in found.items()
            if any(report.found[restore].top > agreed.top for report in reports.values())
        }
        return (
            Report(
                found=found,
                progress=_least(reports, self._ranks, found),
                ended=self._ended.take_complete(),
                copied=self._copied.take_complete(),
                saves=[self._outcome(save) for save in self._saves.take_complete()],
                missed=[key for report in reports.values() for key in report.missed],
                by_layer=self._layers(reports),
                lost=bool(self._lost),
            ),
            tops,
        )

    def _hear(self, rank: int, report: Report) -> None:
        self._ended.say(rank, report.ended)
        self._copied.say(rank, report.copied)
        self._saves.say(rank, (outcome.save for outcome in report.saves))
        self._unstored.update(outcome.save for outcome in report.saves if not outcome.stored)

    def _outcome(self, save: int) -> SaveOutcome:
        stored = save not in self._unstored
        self._unstored.discard(save)
        return SaveOutcome(save, stored and not self._lost)

    def _drop(self, rank: int) -> None:
        self._lost.add(rank)
        for roll in (self._ended, self._copied, self._saves):
            roll.drop(rank)

    def _layers(self, reports: Mapping[int, Report]) -> bool | None:
        news = {r: told.by_layer for r, told in reports.items() if told.by_layer is not None}
        self._by_layer |= news
        if not news or len(self._by_layer) < self._ranks:
            return None
        return all(self._by_layer.values())


def _in_all(each: Sequence[Mapping[int, T]], ranks: int) -> dict[int, list[T]]:
    """What all ``ranks`` say of the restores that all of them know."""
    if len(each) < ranks:
        return {}
    known = set.intersection(*(set(said) for said in each))
    return {restore: [said[restore] for said in each] for restore in sorted(known)}


def _common(reports: Mapping[int, Report], ranks: int) -> dict[int, Found]:
    """The blocks that every rank has found."""
    common = {}
    for restore, each in _in_all([r.found for r in reports.values()], ranks).items():
        top = min(found.top for found in each)
        common[restore] = Found(min(max(found.bottom for found in each), top), top)
    return common


def _least(
    reports: Mapping[int, Report], ranks: int, found: Mapping[int, Found]
) -> dict[int, Progress]:
    """How far restores are on the rank that is least far."""
    said = _in_all([r.progress for r in reports.values()], ranks)
    return {restore: _slowest(each, found.get(restore)) for restore, each in said.items()}


def _slowest(each: Sequence[Progress], found: Found | None) -> Progress:
    if len(each) == 1:
        return each[0]
    low = max(progress.low for progress in each)
    if found is not None:  # a rank that has more of them begins further up
        low = min(low, found.top)
    speeds = [p.block_seconds for p in each if p.block_seconds is not None]
    behind = [p for p in each if not p.dead or p.low >= low]
    """Those that still load, or will not get as low as others."""
    return Progress(
        low=low,
        waited=max(progress.waited for progress in behind),
        block_seconds=max(speeds, default=None),
        first_seconds=max(progress.first_seconds for progress in each),
        dead=any(progress.dead and progress.low >= low for progress in each),
        part=min(progress.part + max(low - progress.low, 0) for progress in each),
        row=all(progress.row or progress.dead for progress in each),
        whole=max(progress.whole for progress in each),
    )

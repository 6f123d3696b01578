"""What tensor-parallel ranks do next, agreed upon by all of them with one small exchange.

Every rank holds some KV heads, loads its own share at its own speed and has a scheduler of its own;
compute needs all of them at once. Before each piece of compute every rank says what it would do
(:class:`Vote`); the votes of all are exchanged, and :func:`agree` makes the same decision of them
everywhere, because it is a function of the votes alone. So there is no leader, no clock that all
share, and nothing to repeat when a rank is late: it is waited for. The rules:

* Calls that every rank makes (a decode step, say) go first, once all ranks make them.
* Work that *any* rank wants is done by *all*: what one cannot load, or loads too slowly, costs the
  request as much wherever that happens. The lowest work goes first, by request, then by position.
* Work goes as far as the rank wants that wants most, and no further than all can go.
* Work that one rank cannot do yet, for it loads what it depends on, is left for the moment.
* What a rank cannot load it says once; from then on compute has to pass it on every rank, and the
  others stop loading it.

Pure: knows no scheduler, transport or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from cacheflow.errors import PeerError
from cacheflow.types import Coverage, Offering

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Act", "Decision", "Need", "Proposal", "Vote", "Work", "agree", "combine"]

Work: TypeAlias = tuple[int, bool, int, int]
"""``(request, is suffix, first token, first layer)``, which sorts as work is done. Requests are
numbered in the order in which the ranks met over them."""
Need: TypeAlias = tuple[int, int, int]
"""``(request, first token, layers)``: compute has to pass so many layers of that tile."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Work that a rank's scheduler has handed out: it wants ``want`` layers of it at once, and is
    able to do ``able``."""

    work: Work
    want: int
    able: int


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says before a decision."""

    calls: tuple[int, ...] = ()
    """What it would call, named by numbers that are the same on every rank."""
    proposal: Proposal | None = None
    blocked: tuple[tuple[int, int], ...] = ()
    """``(request, first token)`` of work that was asked for and cannot go on here yet."""
    needs: tuple[Need, ...] = ()
    gone: tuple[int, ...] = ()
    """Requests that it has given up."""


class Act(StrEnum):
    """What all ranks do."""

    CALL = "call"
    RUN = "run"
    ASK = "ask"
    """Ranks that do not propose the work are asked to."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Decision:
    """The same on every rank. ``layers``: of ``work``, from its first layer on."""

    act: Act
    calls: tuple[int, ...] = ()
    """To be made one after another."""
    work: Work | None = None
    layers: int = 0
    needs: tuple[Need, ...] = ()
    gone: tuple[int, ...] = ()
    blocked: tuple[tuple[int, int], ...] = ()
    """Of any rank: not to be proposed before that has changed."""


def agree(votes: Sequence[Vote]) -> Decision:
    """The decision that the votes of all ranks, by rank, make.

    Raises:
        PeerError: two ranks are at different layers of the same tile: they have diverged.
    """
    heard = Decision(
        Act.NOTHING,
        needs=tuple(sorted({need for vote in votes for need in vote.needs})),
        gone=tuple(sorted({request for vote in votes for request in vote.gone})),
        blocked=tuple(sorted({work for vote in votes for work in vote.blocked})),
    )
    common = set[int].intersection(*(set(vote.calls) for vote in votes))
    if common:
        calls = tuple(call for call in votes[0].calls if call in common)
        return replace(heard, act=Act.CALL, calls=calls)
    proposals = [vote.proposal for vote in votes if vote.proposal is not None]
    _check_layers(proposals)
    for work in sorted({proposal.work for proposal in proposals}):
        request, _, start, _ = work
        if (request, start) in heard.blocked or request in heard.gone:
            continue
        same = [proposal for proposal in proposals if proposal.work == work]
        layers = min(max(p.want for p in same), min(p.able for p in same))
        if layers > 0:
            act = Act.RUN if len(same) == len(votes) else Act.ASK
            return replace(heard, act=act, work=work, layers=layers)
    return heard


def _check_layers(proposals: Sequence[Proposal]) -> None:
    layers: dict[tuple[int, bool, int], int] = {}
    for proposal in proposals:
        request, is_suffix, start, layer = proposal.work
        known = layers.setdefault((request, is_suffix, start), layer)
        if known != layer:
            raise PeerError(
                f"ranks are at layers {known} and {layer} of the tile at token {start}: they "
                "have diverged and have to be started again"
            )


def combine(offerings: Sequence[Offering], rank: int) -> Offering:
    """What counts of what ``rank`` found stored: only cells that every rank found somewhere.

    Chunks that are not what a cold run computes, or went through a lossy codec, on any rank are so
    on all: their KV feeds what all compute.

    Raises:
        PeerError: the ranks do not have the same of it in memory.
    """
    if len({offer.resident for offer in offerings}) > 1:
        held = ", ".join(str(offer.resident) for offer in offerings)
        raise PeerError(
            f"of a prompt of {offerings[rank].subject} the ranks have {held} tokens in memory: "
            "they have to forget the same"
        )
    chunks = max((len(c.layers) for offer in offerings for c in offer.coverage), default=0)
    common = []
    for chunk in range(chunks):
        everywhere = -1
        for offer in offerings:
            here = 0
            for each in offer.coverage:
                here |= each.layers[chunk] if chunk < len(each.layers) else 0
            everywhere &= here
        common.append(everywhere)
    strange = lossy = 0
    for offer in offerings:
        strange |= offer.strange
        lossy |= offer.lossy
    coverage = tuple(
        Coverage(
            each.channel,
            tuple(m & c for m, c in zip(each.layers, common, strict=False)),
            each.stride,
        )
        for each in offerings[rank].coverage
    )
    return replace(offerings[rank], coverage=coverage, strange=strange, lossy=lossy)

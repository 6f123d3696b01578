"""The end of a restore, cell by cell: where both pointers meet when few cells are left.

Far from the end the meeting point is a fluid balance, since speeds will show where it really is.
When one cell is a large part of what is left the balance is off by as much, and compute and a
channel that each judge by their own next cell may disagree; so the best of all meeting points is
found, with the loads in the order in which the suffix needs them.

The suffix begins once compute is through, and passes a layer once that is loaded: it ends at the
later of what either allows. With every cell more compute is later and loads are no later, so the
best meeting is where the two cross, found by bisection. Pure arithmetic: knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, count
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ending"]

_SAME: Final = 1 + 1e-9
"""Floating point: what is nearer than this is equal."""


class Ending:
    """All ways in which compute takes the first of some free cells, in its own order, and the
    channel the others. Times are seconds, or seconds from now.

    ``compute``, ``load``: what each cell takes either way (with the layers that have to be passed
    on the way). ``rest``: what the suffix takes from its layer on. ``compute_free``,
    ``channel_free``: when either could begin another cell. ``landed``: when the suffix would end if
    it waited for nothing but the loads under way. ``suffix``: what is left of it.
    """

    __slots__ = ("_channel_free", "_computed", "_ends", "_landed", "_loads")

    def __init__(
        self,
        compute: Sequence[float],
        load: Sequence[float],
        rest: Sequence[float],
        *,
        compute_free: float,
        channel_free: float,
        landed: float,
        suffix: float,
    ) -> None:
        self._channel_free, self._landed = channel_free, landed
        self._computed = list(accumulate(compute, initial=compute_free + suffix))
        """When the suffix would end if compute took so many cells, and all others were there."""
        # Earliest deadline first: the suffix needs those first after which most of it is left.
        self._loads = sorted(zip(rest, count(), load, strict=False), reverse=True)
        self._ends: dict[int, float] = {}
        """What :meth:`_loaded` found."""

    def meeting(self) -> int:
        """How many cells to recompute so that the suffix ends first; the fewest of equals."""
        computed, loaded = self._computed, self._loaded
        every = range(len(computed) - 1)
        crossing = bisect_left(every, True, key=lambda cells: computed[cells] >= loaded(cells))
        best = max(computed[crossing], loaded(crossing))
        if crossing:
            before = loaded(crossing - 1)  # compute is the earlier one there
            if before > best * _SAME:
                return crossing  # With fewer cells still, loads are no sooner.
            best = min(best, before)
        best *= _SAME  # and so no earlier than loads at the crossing
        return bisect_left(every, True, hi=crossing, key=lambda cells: loaded(cells) <= best)

    def computes(self) -> bool:
        """Whether compute takes a cell at all: :meth:`meeting` is above 0, without looking for
        it."""
        limit = self._loaded(0) / _SAME
        cells = bisect_left(self._computed, limit) - 1
        return cells > 0 and self._loaded(cells) < limit

    def _loaded(self, cells: int) -> float:
        """When the suffix would end if compute took so many cells in no time."""
        ends = self._ends
        if cells not in ends:
            end, sent = self._landed, self._channel_free
            for rest, i, load in self._loads:
                if i >= cells:
                    sent += load
                    if (late := sent + rest) > end:
                        end = late
            ends[cells] = end
        return ends[cells]

"""How many blocks compute should take next, while loads come towards it from the other end.

Pure arithmetic over learned costs. vLLM decides once a step, so a choice cannot be taken back
before the step ends: the point where the two will meet is predicted, and the step is sized for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Final

from cacheflow.types import Tile

if TYPE_CHECKING:
    from cacheflow.costs import ComputeModel

__all__ = ["WAIT", "WHOLE", "View", "choose", "hideable", "may_begin", "tail"]

WAIT: Final = 0
"""Compute nothing for this request now: its loads end sooner by themselves."""
WHOLE: Final = -1
"""Do not wait for loads at all: compute up to the end of the prompt."""

_WORTH: Final = 0.03
"""Both ends together have to save this share, or the simpler way is taken."""
_LOOK: Final = 0.25
"""Share of that saving which may be spent on looking halfway whether it all goes as predicted."""
_COLD_SECONDS: Final = 0.01
"""How long compute waits for the first load of a channel that nothing is known of."""
_COLD_BLOCKS: Final = 4
"""Blocks computed at a time while nothing is known of compute."""
_LATE: Final = 2.0
"""A block that takes this many times what was expected is late: compute goes on instead."""
_LATE_SECONDS: Final = 0.005
"""... but at least this much longer."""
_LEAST_BLOCK: Final = 0.008
"""Seconds a block below which reads of single layers would cost more than they hide: where blocks
took 4 ms, bands of layers made 32 of them 1.4 times as slow to load (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class View:
    """One request as it stands. Tokens count from the prompt's start."""

    done: int
    """Tokens that are computed, or in the local prefix cache."""
    tokens: int
    """Tokens of the whole prompt."""
    block: int
    """Tokens of a block."""
    top: int
    """Blocks ``[.., top)`` can be restored; the tokens behind are computed in any case."""
    low: int
    """Blocks ``[low, top)`` are there."""
    bottom: int
    """Blocks below are not stored (or cannot be loaded any more): compute has to take them."""
    block_seconds: float | None
    """Predicted seconds a block takes on the channel; None: nothing is known."""
    first_seconds: float
    """Latency and queue still to be waited out before the next block."""
    waited: float
    """Seconds since the last block arrived."""
    budget: int
    """Tokens that a step may compute."""
    part: float = 0.0
    """What is there of the blocks below ``low``, in blocks."""
    hidden: float = 0.0
    """Share of the forward pass behind the top under which loads may go on."""
    whole: int = 0
    """Blocks that are on their way with all their layers at once: no pass begins before them."""

    @property
    def edge(self) -> int:
        """The first block that compute has not touched."""
        return -(-self.done // self.block)

    @property
    def gap(self) -> int:
        """Blocks that neither end has."""
        return max(self.low - self.edge, 0)


def choose(view: View, costs: ComputeModel) -> int:
    """Blocks to compute next (1 to the gap), :data:`WAIT` or :data:`WHOLE`."""
    gap = view.gap
    if not gap:
        return WAIT
    if view.low <= view.bottom:
        return gap if view.low < view.top else WHOLE
    needed = max(view.bottom - view.edge, 0)
    if view.block_seconds is None:
        cold = not needed and view.waited < _COLD_SECONDS
        return WAIT if cold else min(gap, max(needed, _COLD_BLOCKS))
    if not costs.known:
        return min(gap, max(needed, _COLD_BLOCKS))
    return _weigh(view, needed, costs)


def _weigh(view: View, needed: int, costs: ComputeModel) -> int:
    behind = _pass(view.top * view.block, view.tokens, view.budget, costs)
    hidden = hideable(view, costs)
    counts = range(max(needed, 1), view.gap + 1)
    best, blocks = min((_both(view, count, hidden, costs), count) for count in counts)
    race, whole = best + behind, _pass(view.done, view.tokens, view.budget, costs)
    alone = inf
    if not needed and not _is_late(view):
        alone = max(_visible(view, view.gap, hidden), 0.0) + behind
        if min(race, whole) >= alone * (1.0 - _WORTH):
            return WAIT
    if whole <= race * (1.0 + _WORTH):
        return WHOLE
    return blocks if needed else _first_part(view, blocks, min(alone, whole) - race, costs)


def _first_part(view: View, blocks: int, saved: float, costs: ComputeModel) -> int:
    """Half of the ``blocks`` where a second step costs little of the ``saved`` seconds: where
    compute or loads are not as fast as was thought, the ends meet elsewhere."""
    half = -(-blocks // 2)
    middle, stop = (view.edge + half) * view.block, (view.edge + blocks) * view.block
    once = _pass(view.done, stop, view.budget, costs)
    first = _pass(view.done, middle, view.budget, costs)
    more = first + _pass(middle, stop, view.budget, costs) - once
    return half if more <= _LOOK * saved else blocks


def hideable(view: View, costs: ComputeModel) -> float:
    """Seconds for which loads may go on after the pass behind the top has begun."""
    if view.block_seconds is None or view.block_seconds < _LEAST_BLOCK:
        return 0.0
    start = view.top * view.block
    stop = min(view.tokens, start + view.budget)
    return view.hidden * (costs.layer_seconds(Tile(0, start, stop)) or 0.0)


def tail(view: View, costs: ComputeModel) -> int:
    """How many of the last blocks should come by layers, so that a pass can begin under them."""
    hidden = hideable(view, costs)
    if not hidden or view.block_seconds is None:
        return 0
    return ceil(hidden / view.hidden / view.block_seconds)


def may_begin(view: View, costs: ComputeModel) -> bool:
    """Whether all that is still to come is expected while the pass behind the top runs."""
    hidden = hideable(view, costs)
    if not hidden or view.bottom > view.edge or view.done % view.block or _is_late(view):
        return False
    return _left(view, view.gap) <= hidden


def _both(view: View, count: int, hidden: float, costs: ComputeModel) -> float:
    """Seconds until ``count`` blocks are computed and of the rest of the gap no more is to be
    loaded than ``hidden`` seconds bring."""
    stop = (view.edge + count) * view.block
    left = _visible(view, view.gap - count, hidden)
    return max(_pass(view.done, stop, view.budget, costs), left)


def _visible(view: View, blocks: int, hidden: float) -> float:
    """Seconds for which ``blocks`` more blocks keep the pass behind them from beginning. Of those
    that come by layers the first ones have to be there."""
    seconds = view.block_seconds
    assert seconds is not None
    by_layers = view.hidden * max(blocks - view.whole, 0) * seconds
    return _left(view, blocks) - min(hidden, by_layers)


def _left(view: View, blocks: int) -> float:
    """Seconds until ``blocks`` more blocks have arrived.

    One that is late is expected to take as long again as it is late.
    """
    rest = blocks - view.part
    if rest <= 0.0:
        return 0.0
    seconds = view.block_seconds
    assert seconds is not None
    first = min(rest, 1.0) * seconds + view.first_seconds
    head = max(first - view.waited, view.waited - first, 0.0)
    return head + max(rest - 1.0, 0.0) * seconds


def _is_late(view: View) -> bool:
    seconds = view.block_seconds
    assert seconds is not None
    expected = seconds + view.first_seconds
    return view.waited > max(_LATE * expected, expected + _LATE_SECONDS)


def _pass(start: int, stop: int, budget: int, costs: ComputeModel) -> float:
    """Predicted seconds to compute tokens ``[start, stop)`` in steps of ``budget`` at most."""
    total = 0.0
    while start < stop:
        end = min(start + budget, stop)
        total += costs.layer_seconds(Tile(0, start, end)) or 0.0
        start = end
    return total

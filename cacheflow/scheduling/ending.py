"""The end of a restore, cell by cell: where both pointers meet when few cells are left.

Far from the end the meeting point is a fluid balance, since speeds will show where it really is.
When one cell is a large part of what is left the balance is off by as much, and compute and a
channel that each judge by their own next cell may disagree; so every meeting point is tried, with
the loads in the order in which the suffix needs them. Pure arithmetic: knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Cell", "Ending", "best_meeting"]

Cell: TypeAlias = tuple[float, float, int]
"""Seconds to compute (with the layers that have to be passed on the way) and to load; its layer."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known when the end is planned; seconds from now.

    ``compute_free``, ``channel_free``: when either could begin another cell. ``landing``: when the
    loads under way will have brought each layer. ``suffix_low``, ``suffix_layers``: the layer that
    the suffix stands at, of how many; ``suffix_layer``: seconds of one.
    """

    compute_free: float
    channel_free: float
    landing: Mapping[int, float]
    suffix_low: int
    suffix_layers: int
    suffix_layer: float

    def end(self, start: float, layers: Sequence[int], loads: Sequence[float]) -> float:
        """When the suffix is done if compute turns to it at ``start`` and the channel has still to
        fetch ``loads[i]`` seconds of ``layers[i]``, lowest first (earliest deadline first)."""
        end, low, sent = start, self.suffix_low, self.channel_free
        landing, each = self.landing, self.suffix_layer
        for layer, load in zip(layers, loads, strict=True):
            if layer > low:
                end += (layer - low) * each
                low = layer
            if load:
                sent += load
                if sent > end:
                    end = sent
            if layer in landing and landing[layer] > end:
                end = landing[layer]
        return end + (self.suffix_layers - low) * each


def best_meeting(cells: Sequence[Cell], known: Ending) -> int:
    """How many of ``cells``, free cells in the order of compute, to recompute so that the suffix
    ends first; the fewest of equals."""
    spent = known.compute_free + sum(cell[0] for cell in cells)
    layers = sorted({*known.landing, *(cell[2] for cell in cells)})
    place = {layer: i for i, layer in enumerate(layers)}
    loads = [0.0] * len(layers)
    best, found = known.end(spent, layers, loads), len(cells)
    for count in range(len(cells) - 1, -1, -1):
        compute, load, layer = cells[count]
        spent -= compute
        loads[place[layer]] += load
        end = known.end(spent, layers, loads)
        if end <= best * (1 + 1e-9):
            best, found = min(best, end), count
    return found

"""What one load brings: a block whole, or some of its layers where a suffix may begin under the
last loads.

A suffix's forward pass needs a layer of the prefix only when it reaches it. So the last blocks come
by bands of layers, the first band of all of them before the second of any. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BANDS", "Piece", "arranged", "bands", "hidden_share"]

BANDS: Final = 5
"""More would hide more of the loads (all but one band), but cost more reads."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers ``layers`` of a request's block number ``block``."""

    block: int
    layers: Span

    @property
    def mask(self) -> int:
        """Its layers as bits."""
        return (1 << self.layers.stop) - (1 << self.layers.start)


def bands(layers: int) -> list[Span]:
    """``layers`` layers in order, in :data:`BANDS` bands (or as many as there are layers)."""
    count = min(BANDS, layers)
    edges = [layers * i // count for i in range(count + 1)]
    return [Span(start, stop) for start, stop in pairwise(edges)]


def hidden_share(layers: int) -> float:
    """Share of a forward pass that is over when it needs the last band."""
    return bands(layers)[-1].start / layers


def arranged(waiting: Iterable[Piece], stop: int, layers: int) -> list[Piece]:
    """``waiting`` pieces of blocks of ``layers`` layers in a new order, the next one last: blocks
    from ``stop`` on whole, from the last one down, then those below by bands."""
    whole: list[Piece] = []
    parts: list[Piece] = []
    for piece in waiting:
        if len(piece.layers) < layers:
            parts.append(piece)
        elif piece.block >= stop:
            whole.append(piece)
        else:
            parts += [Piece(piece.block, band) for band in bands(layers)]
    parts.sort(key=lambda piece: (-piece.layers.start, piece.block))
    return [*parts, *sorted(whole, key=lambda piece: piece.block)]

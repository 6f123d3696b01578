"""Which leading tiles compute takes row by row, and so in which order it takes cells.

Tiles are narrow at the front of a prompt, and narrow tiles are dear: a pass costs its launch and
reads the weights whatever its width. Tile by tile, compute would spend all it has on them where the
meeting point is near. A staircase has a cheaper way to as many cells: a few layers of *all* leading
tiles up to a wide one cost what these cost on average. So the tiles up to where that average is
lowest form rows of a few layers each, passed one after the other; behind them attention makes every
tile dearer than the one before, and they follow tile by tile.

Together that is the concave hull of what compute can save by the second. Pure arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NO_ROWS", "Rows", "dense_tiles"]

_WORTH: Final = 0.03
"""By how much cheaper a token must be on average than in the first tile: rows cost hand-overs."""
_A_REQUEST: Final = 8
"""Rows: fewer hand-overs of the compute stream than one a cell, and still fine enough to meet in
(0.1 to 0.4 % of a batch's mean above rows of one layer)."""


class Rows(NamedTuple):
    """The first ``tiles`` tiles go through ``layers`` layers each, in turn."""

    tiles: int
    layers: int

    @classmethod
    def of(cls, tiles: int, num_layers: int) -> Rows:
        """Rows of some eighth of the layers."""
        return cls(tiles, max(1, num_layers // _A_REQUEST))

    def first(self, layer: int) -> int:
        """Where the row of ``layer`` begins."""
        return layer - layer % self.layers

    def behind(self, layer: int) -> int:
        """Where the next row begins."""
        return self.first(layer) + self.layers


NO_ROWS: Final = Rows(0, 1)


def dense_tiles(widths: Sequence[float], seconds: Sequence[float]) -> int:
    """How many leading tiles cost least a token together; 0 where the first alone nearly does.

    ``widths``: tokens (or seconds of load) of each tile. ``seconds``: of one layer of each.
    """
    best, tiles, tokens, spent = 0.0, 0, 0.0, 0.0
    for t, (width, cost) in enumerate(zip(widths, seconds, strict=True)):
        tokens, spent = tokens + width, spent + cost
        if spent <= 0.0:
            return 0
        if t == 0:
            best = tokens / spent * (1 + _WORTH)
        elif tokens / spent > best:
            best, tiles = tokens / spent, t + 1
    return tiles

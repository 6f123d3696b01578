"""How much of a prompt is restored, by what of it is stored. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import TileGrid

__all__ = ["restorable"]


def restorable(
    stored: int,
    usable: int,
    grid: TileGrid,
    chunk_tokens: int,
    is_strange: Callable[[range], bool],
) -> int:
    """How many of the leading chunks of a prompt to restore: all before the end of ``stored``, the
    last chunk of which anything is stored; ``usable``: how many the prompt has.

    What is behind them is stored nowhere and computed with the suffix. A turn ends somewhere in a
    tile, so does what it leaves stored, and the next turn loads that piece. But where the prompt
    covers the tile, and what is stored of it is of the grid's own pass, the whole tile is restored:
    that pass is repeated bit for bit if it is computed, and a piece of it would not be.

    ``is_strange``: whether any copy of these chunks is of another pass.
    """
    if not stored:
        return 0
    tile = grid.tile(grid.index_at(stored * chunk_tokens - 1))
    first, whole = tile.start // chunk_tokens, tile.stop // chunk_tokens
    if stored < whole <= usable and not is_strange(range(first, stored)):
        return whole
    return min(stored, usable)

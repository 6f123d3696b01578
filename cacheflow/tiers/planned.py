"""Write policy ``planned``: do not store the head of a prefix that any restore would recompute.

A restore recomputes from the front what takes no longer than loading the rest. How far that gets
depends on speeds nobody knows beforehand, so the bound is the frontier of the worst case for
recompute: the link faster and compute slower than they were measured, and a suffix to compute as
well. Every other restore of that prefix recomputes at least as much, and so does one of a longer
prefix unless its suffix has become dearer by more than the loads that were added. Knows costs and
positions; no bytes, no tiers and no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from cacheflow.scheduling.rows import dense_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.types import KVLayout, Tile, TileGrid

__all__ = ["Margins", "PlannedWrites", "recomputed_anyway"]


_LONGER: Final = 4
"""Tiles behind a prefix that are looked at to see where its rows would end in a longer one."""


@dataclass(frozen=True, slots=True)
class Margins:
    """How far the speeds of a later restore may be from those measured, against recompute."""

    link: float = 2.0
    """All channels together may be this many times as fast: an idle link, a better day."""
    compute: float = 2.0
    """Compute may be this many times slower: other requests and decode have their share."""
    suffix_tokens: int = 1024
    """Tokens behind the prefix that compute has to take as well."""
    least: float = 0.03
    """A smaller share of the prefix is not worth leaving out."""


def recomputed_anyway(
    prefix_tokens: int,
    chunk_tokens: int,
    grid: TileGrid,
    tile_seconds: Callable[[Tile], float],
    chunk_seconds: float,
    margins: Margins = Margins(),
) -> int:
    """How many leading chunks of a prefix every plausible frontier recomputes, all layers of them.

    ``tile_seconds(tile)``: to recompute all layers of a tile. ``chunk_seconds``: to load all layers
    of a chunk when nothing else is loaded, over all channels together. Whole tiles only: the tile
    in which both ends meet needs what is stored of it, and so do leading tiles that are recomputed
    row by row (:func:`dense_tiles`, of a longer prefix as well) unless all their rows are. A
    request that shares only a part of the prefix may meet its loads earlier; what it misses then is
    a hole in front, and is recomputed.
    """
    chunks = prefix_tokens // chunk_tokens
    chunk_seconds /= margins.link
    prefix = chunks * chunk_tokens
    suffix = grid.split(prefix, prefix + margins.suffix_tokens)
    spent = margins.compute * sum(map(tile_seconds, suffix))
    recomputed, longer = 0, grid.split(0, prefix + _LONGER * grid.tail)
    dense = dense_tiles([tile.width for tile in longer], [tile_seconds(tile) for tile in longer])
    for number, tile in enumerate(grid.split(0, prefix), 1):
        spent += margins.compute * tile_seconds(tile)
        through = tile.stop // chunk_tokens
        if spent > (chunks - through) * chunk_seconds:
            break
        if number >= dense:
            recomputed = through
    return recomputed if recomputed >= margins.least * chunks else 0


class PlannedWrites:
    """:func:`recomputed_anyway` by what ``compute`` and all ``channels`` have learned so far.

    While anything is unknown everything is stored.
    """

    name: ClassVar[str] = "planned"

    def __init__(
        self,
        compute: ComputeModel,
        channels: Sequence[ChannelModel],
        layout: KVLayout,
        grid: TileGrid,
    ) -> None:
        self._compute = compute
        self._channels = channels
        self._layout = layout
        self._grid = grid

    def skipped(self, chunks: int) -> int:
        """See :class:`cacheflow.tiers.write_policies.WritePolicy`."""
        bandwidths = [channel.bandwidth for channel in self._channels]
        if not self._compute.known or not bandwidths or None in bandwidths:
            return 0
        together = sum(bandwidth for bandwidth in bandwidths if bandwidth is not None)
        size = self._layout.chunk_tokens
        seconds = self._layout.payload_bytes() / together
        return recomputed_anyway(chunks * size, size, self._grid, self._tile_seconds, seconds)

    def _tile_seconds(self, tile: Tile) -> float:
        seconds = self._compute.layer_seconds(tile)
        assert seconds is not None, "asked before anything was known"
        return self._layout.num_layers * seconds

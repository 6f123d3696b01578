"""Who holds the KV of a prefix in memory, or is restoring it: whole grid tiles, by chunk key.

A tile is known by the key of its last chunk, which names all tokens up to there. Loop-owned. Knows
neither engines nor the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkKey, Segment, Tile, TileGrid

__all__ = ["Prefixes"]


class Prefixes:
    """Requests by the tiles that they have from their first token on."""

    def __init__(self, grid: TileGrid, chunk_tokens: int) -> None:
        self._grid = grid
        self._chunk_tokens = chunk_tokens
        self._holders: dict[ChunkKey, dict[str, None]] = {}
        self._offered: dict[str, list[ChunkKey]] = {}

    def offer(self, request_id: str, keys: Sequence[ChunkKey], tiles: Sequence[Tile]) -> None:
        """``request_id`` has the whole ones of these tiles; replaces what it offered."""
        self.withdraw(request_id)
        ends = [self._key(keys, tile) for tile in self._whole(tiles)]
        if ends:
            self._offered[request_id] = ends
        for key in ends:
            self._holders.setdefault(key, {})[request_id] = None

    def offer_resident(
        self, request_id: str, keys: Sequence[ChunkKey], segments: Sequence[Segment]
    ) -> None:
        """The same for a request whose KV was computed as ``segments`` say: only tiles that are the
        very bits of the grid's own pass count."""
        exact = {(s.start, s.stop) for s in segments if s.width == s.stop - s.start and not s.lossy}
        tiles: list[Tile] = []
        tile = self._grid.tile(0)
        while (tile.start, tile.stop) in exact and tile.stop <= len(keys) * self._chunk_tokens:
            tiles.append(tile)
            tile = self._grid.tile(len(tiles))
        self.offer(request_id, keys, tiles)

    def withdraw(self, request_id: str) -> None:
        """The request has nothing to share any more. Idempotent."""
        for key in self._offered.pop(request_id, ()):
            holders = self._holders[key]
            del holders[request_id]
            if not holders:
                del self._holders[key]

    def find(
        self, keys: Sequence[ChunkKey], tiles: Sequence[Tile]
    ) -> tuple[str, Sequence[Tile]] | None:
        """Who has most of these tiles, and which; of several the one that came first."""
        whole = self._whole(tiles)
        for count in range(len(whole), 0, -1):
            holders = self._holders.get(self._key(keys, whole[count - 1]))
            if holders:
                return next(iter(holders)), whole[:count]
        return None

    def _whole(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        """Without a last piece of a tile: its page holds something else behind it."""
        return tiles[:-1] if tiles and tiles[-1] != self._grid.tile(tiles[-1].index) else tiles

    def _key(self, keys: Sequence[ChunkKey], tile: Tile) -> ChunkKey:
        return keys[tile.stop // self._chunk_tokens - 1]

"""Stores of named blocks in a simulation: the very eviction policies and write rules of real tiers.

All blocks are of one size, so a capacity is a number of blocks. Knows positions; no bytes, no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from cacheflow.tiers.eviction import load_eviction
from cacheflow.tiers.planned import recomputed_anyway
from cacheflow.tiers.value import chance_of_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.tiers.eviction import EvictionName
    from cacheflow.types import Tile, TileGrid

__all__ = ["LRU", "BlockStore", "Keeping"]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a store takes and what it lets go.

    ``worth(index)``: seconds that loading block ``index`` of a prefix saves. ``chance(blocks)``:
    how likely each block of a request would be loaded. ``skipped(blocks)``: leading blocks that are
    not stored. ``heads_last``: of blocks used together the first of the prefix counts as the most
    recent, so that a policy without costs keeps what every continuation needs (as servers that need
    contiguous prefixes must). ``renewed``: what is there already of a request keeps its place in
    that order when the rest is stored; for a policy that counts uses it would be one too many.
    ``whole(blocks)``: leading blocks in whole tiles. The others are pieces of a tile.
    """

    eviction: EvictionName = "lru"
    worth: Callable[[int], float] = lambda index: 1.0
    chance: Callable[[int], Sequence[float]] = lambda blocks: (1.0,) * blocks
    skipped: Callable[[int], int] = lambda blocks: 0
    whole: Callable[[int], int] = lambda blocks: blocks
    heads_last: bool = True
    renewed: bool = True

    @classmethod
    def of(
        cls,
        eviction: EvictionName,
        writes: str,
        block_tokens: int,
        grid: TileGrid,
        tile_seconds: Callable[[Tile], float],
        block_seconds: float,
    ) -> Keeping:
        """``writes``: ``all`` or ``planned``. ``tile_seconds``: to recompute all layers of a tile.
        ``block_seconds``: to load a block over all links together."""

        @cache
        def worth(index: int) -> float:
            tile = grid.tile(grid.index_at(index * block_tokens))
            return tile_seconds(tile) * block_tokens / tile.width

        @cache
        def chance(blocks: int) -> Sequence[float]:
            return chance_of_loading(blocks, block_tokens, grid, tile_seconds, block_seconds)

        @cache
        def skipped(blocks: int) -> int:
            tokens = blocks * block_tokens
            return recomputed_anyway(tokens, block_tokens, grid, tile_seconds, block_seconds)

        def whole(blocks: int) -> int:
            return grid.tile(grid.index_at(blocks * block_tokens)).start // block_tokens

        keeping = cls(eviction, renewed=eviction == "lru", whole=whole)
        if eviction == "cost-aware":
            keeping = replace(keeping, worth=worth, chance=chance, heads_last=False)
        return replace(keeping, skipped=skipped) if writes == "planned" else keeping


LRU: Final = Keeping()
"""Everything is stored, the least recently used leaves."""


class BlockStore:
    """Names of the blocks a tier holds. ``capacity``: how many (None: as many as come)."""

    def __init__(self, capacity: int | None = None, keeping: Keeping = LRU) -> None:
        self._capacity = capacity
        self._keeping = keeping
        self._blocks: set[int] = set()
        self._pieces: set[int] = set()
        """Of them those that were computed as a piece of a tile, or after one."""
        self._order = load_eviction(keeping.eviction, int)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def is_piece(self, block: int) -> bool:
        """Whether it is there, and not of the grid's own passes up to it."""
        return block in self._pieces

    def look_up(self, blocks: Sequence[int]) -> list[bool]:
        """Which of a request's leading blocks are there; these have been used now, as those of a
        prefix that ends with the last of them."""
        there = [block in self._blocks for block in blocks]
        reach = max((index + 1 for index, found in enumerate(there) if found), default=0)
        chance, worth = self._keeping.chance(reach), self._keeping.worth
        for index in self._in_order(reach):
            if there[index]:
                self._order.touch(blocks[index], chance[index], worth(index))
        return there

    def add(self, blocks: Iterable[int]) -> list[int]:
        """Store what is missing of the blocks of one request, in the order of its prefix, and worth
        its place. The use of the others was counted when they were looked up.

        Returns those that were written, in that order.
        """
        blocks, written = tuple(blocks), []
        skipped, whole = self._keeping.skipped(len(blocks)), self._whole(blocks)
        chance, worth = self._keeping.chance(len(blocks)), self._keeping.worth
        for index in self._in_order(len(blocks)):
            block = blocks[index]
            if block in self._blocks:
                if self._keeping.renewed:
                    self._order.touch(block)
            elif index >= skipped and self._has_room(worth(index), chance[index]):
                self._blocks.add(block)
                self._order.insert(block, 1, worth(index), chance[index])
                written.append(block)
                if index >= whole:
                    self._pieces.add(block)
        return written[::-1] if self._keeping.heads_last else written

    def remove(self, blocks: Iterable[int]) -> None:
        """These were not stored after all."""
        for block in blocks:
            self._blocks.discard(block)
            self._pieces.discard(block)
            self._order.remove(block)

    def _whole(self, blocks: Sequence[int]) -> int:
        """How many of the leading ``blocks`` the grid's own passes have made, if all were loaded
        that are there."""
        pieces = (index for index, block in enumerate(blocks) if block in self._pieces)
        return min(self._keeping.whole(len(blocks)), next(pieces, len(blocks)))

    def _has_room(self, worth: float, chance: float) -> bool:
        """Before a block comes in, as in a real tier: what comes in never leaves for itself."""
        if self._capacity is None or len(self._blocks) < self._capacity:
            return True
        if not self._order.admits(1, worth, chance):
            return False
        surplus = len(self._blocks) + 1 - self._capacity
        victims = self._order.victims(surplus, lambda block: False)
        self._blocks.difference_update(victims)
        self._pieces.difference_update(victims)
        return True

    def _in_order(self, blocks: int) -> Iterable[int]:
        return reversed(range(blocks)) if self._keeping.heads_last else range(blocks)

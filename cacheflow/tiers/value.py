"""What a stored object is worth to a tier: how eviction is told about costs. Pure.

Two questions. *What does one use of it save?* The recompute of its tokens, which grows with their
position because of attention: the head of a prefix is cheap to recompute. *Is a use going to load
it at all?* A restore recomputes the head of a prefix while it loads the tail, so what lies before
their meeting point saves nothing, and what lies behind it saves all of its recompute.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.types import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.types import KVLayout, TileGrid

__all__ = ["FLAT", "CostValue", "Value", "chance_of_loading"]

_SUFFIX_TOKENS: Final = 1024
"""What comes behind a prefix when it is used again, on average: an answer and a question."""
_LEAST: Final = 0.01
"""Chance of what restores recompute: other sources may fail."""


class Value(Protocol):
    """Asked at every lookup and store; answers at once, on any scale that is always the same."""

    def per_byte(self, start: int, stop: int, cells: int, nbytes: int) -> float:
        """What loading ``nbytes`` saves, per byte: KV of ``cells`` token-layers that were computed
        somewhere in tokens ``[start, stop)``."""
        ...

    def evidence(self, chunks: int) -> Sequence[float]:
        """How likely each chunk of a request of ``chunks`` would really be loaded, 0 to 1."""
        ...


class _Flat:
    """Every byte and every use is worth the same."""

    def per_byte(self, start: int, stop: int, cells: int, nbytes: int) -> float:
        return 1.0

    def evidence(self, chunks: int) -> Sequence[float]:
        return (1.0,) * chunks


FLAT: Final[Value] = _Flat()


class CostValue:
    """By what compute and channels have learned so far. ``channels``: all that loads share.

    While a speed is unknown every use counts; while compute is unknown, linear work and attention
    are taken to run at the same rate.
    """

    def __init__(self, compute: ComputeModel, layout: KVLayout, grid: TileGrid) -> None:
        self._compute = compute
        self._layout = layout
        self._grid = grid
        self._channels: tuple[ChannelModel, ...] = ()

    def loads_over(self, channels: Iterable[ChannelModel]) -> None:
        """These are all the channels there are."""
        self._channels = tuple(channels)

    def per_byte(self, start: int, stop: int, cells: int, nbytes: int) -> float:
        tile = Tile(0, start, max(stop, start + 1))
        seconds = self._compute.layer_seconds(tile)
        if seconds is None:
            seconds = sum(self._compute.work(tile)) * 1e-12
        return seconds / tile.width * cells / nbytes

    def evidence(self, chunks: int) -> Sequence[float]:
        bandwidths = [channel.bandwidth for channel in self._channels]
        known = [bandwidth for bandwidth in bandwidths if bandwidth is not None]
        if not self._compute.known or not known or len(known) < len(bandwidths):
            return (1.0,) * chunks
        size = self._layout.chunk_tokens
        seconds = self._layout.payload_bytes() / sum(known)
        return chance_of_loading(chunks, size, self._grid, self._tile_seconds, seconds)

    def _tile_seconds(self, tile: Tile) -> float:
        seconds = self._compute.layer_seconds(tile)
        assert seconds is not None, "asked before anything was known"
        return self._layout.num_layers * seconds


def chance_of_loading(
    chunks: int,
    chunk_tokens: int,
    grid: TileGrid,
    tile_seconds: Callable[[Tile], float],
    chunk_seconds: float,
) -> tuple[float, ...]:
    """For each chunk of a prefix: 1 from the tile on in which compute and loads would meet by the
    speeds as measured, less and less before it. The same for all chunks of a tile: a tile of which
    one is missing is computed.

    Compute reaches a tile in front of the meeting point with seconds to spare, and meets its loads
    there all the same if a suffix takes longer than that: suffixes are taken to be distributed
    exponentially, around ``_SUFFIX_TOKENS``.

    ``tile_seconds`` and ``chunk_seconds``: see :func:`cacheflow.tiers.planned.recomputed_anyway`.
    """
    tokens = chunks * chunk_tokens
    typical = sum(map(tile_seconds, grid.split(tokens, tokens + _SUFFIX_TOKENS)))
    chances: list[float] = []
    spent = 0.0
    for tile in grid.split(0, tokens):
        spent += tile_seconds(tile)
        through = tile.stop // chunk_tokens
        spare = (chunks - through) * chunk_seconds - spent
        chance = max(exp(-max(spare, 0.0) / typical), _LEAST)
        chances += [chance] * (through - len(chances))
    return tuple(chances)

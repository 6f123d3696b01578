"""What a stored object is worth to a tier: how eviction is told about costs. Pure.

Two questions. *What does one use of it save?* The recompute of its tokens, which grows with their
position because of attention: the head of a prefix is cheap to recompute. *How likely is a use to
load it at all?* A restore recomputes the head of a prefix while it loads the tail, so what lies
before every plausible meeting point is never loaded, and what lies behind all of them always is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.tiers.planned import Margins, recomputed_anyway
from cacheflow.types import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.types import KVLayout, TileGrid

__all__ = ["FLAT", "CostValue", "Value", "chance_of_loading"]

_SURE: Final = Margins(link=0.5, compute=0.5, suffix_tokens=0)
"""The other end of what is plausible: links slower, compute faster than measured, no suffix."""
_LEAST: Final = 0.01
"""Chance of what every plausible restore recomputes: other sources may fail."""


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
    """For each chunk of a prefix: next to none before the first plausible meeting point of compute
    and loads, 1 behind the last one, in between in proportion. The same for all chunks of a tile: a
    tile of which one is missing is computed.

    ``tile_seconds`` and ``chunk_seconds``: see :func:`cacheflow.tiers.planned.recomputed_anyway`.
    """
    first, last = (
        recomputed_anyway(chunks * chunk_tokens, chunk_tokens, grid, tile_seconds, seconds, margins)
        for seconds, margins in ((chunk_seconds, Margins()), (chunk_seconds, _SURE))
    )
    width = max(last - first, 1)
    chances: list[float] = []
    for tile in grid.split(0, chunks * chunk_tokens):
        through = tile.stop // chunk_tokens
        chance = min(max((through - first) / width, _LEAST), 1.0)
        chances += [chance] * (through - len(chances))
    return tuple(chances)

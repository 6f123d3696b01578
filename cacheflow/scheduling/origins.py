"""Where the cells of one prefix came from, each counted once. Pure bookkeeping: decides nothing.

Loads deliver chunks and compute writes whole tiles, so a layer of a tile may get some chunks from a
tier, and all of them from compute once the others turn out to be late or lost. Compute's copy is
then the one that is there.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RECOMPUTE", "Origins"]

RECOMPUTE: Final = "recompute"


class Origins:
    """Of one request. One thread may tell of compute while another tells of loads."""

    __slots__ = ("_loads", "_written")

    def __init__(self) -> None:
        self._written: dict[int, list[int]] = {}
        """Width of a tile and the layers (bitmap) that compute wrote of it."""
        self._loads: list[tuple[str, int, int, int]] = []
        """Channel, tile, layers (bitmap), tokens; no two of the same chunk and layer."""

    def wrote(self, tile: int, width: int, layer: int) -> None:
        """Compute wrote ``layer`` of all ``width`` tokens of ``tile``."""
        self._written.setdefault(tile, [width, 0])[1] |= 1 << layer

    def loaded(self, channel: str, tile: int, layers: int, tokens: int) -> None:
        """``layers`` (bitmap) of ``tokens`` tokens of ``tile`` were published."""
        if layers:
            self._loads.append((channel, tile, layers, tokens))

    @property
    def recomputed(self) -> int:
        """Token-layers that compute wrote."""
        return sum(width * layers.bit_count() for width, layers in self._written.values())

    @property
    def by_channel(self) -> dict[str, int]:
        """Token-layers by the channel that delivered them, of those that compute did not write."""
        sums: dict[str, int] = {}
        for channel, tile, layers, tokens in self._loads:
            _, written = self._written.get(tile, (0, 0))
            if kept := (layers & ~written).bit_count() * tokens:
                sums[channel] = sums.get(channel, 0) + kept
        return sums

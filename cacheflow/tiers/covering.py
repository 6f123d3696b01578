"""Which stored objects of a chunk together hold what a rank needs of it, whoever wrote them.

Objects are named by absolute ranges of layers and KV heads. A layer that one object has whole is
taken from that one, else from as few as go; pure arithmetic on ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkInfo

__all__ = ["Take", "bitmap", "cover"]


@dataclass(frozen=True, slots=True)
class Take:
    """What to take of one object: absolute ``layers`` and ``heads``, all of them in it."""

    info: ChunkInfo
    layers: Span
    heads: Span

    @property
    def is_whole(self) -> bool:
        """Whether it is all heads of its object."""
        heads = self.info.key.heads
        return self.heads is heads or self.heads == heads


def cover(infos: Sequence[ChunkInfo], layers: Span, heads: Span) -> list[Take]:
    """The parts of ``infos`` that make up ``layers`` x ``heads``, in the order of layers.

    Earlier objects are preferred.

    Raises:
        LookupError: some layer is not there with all heads.
    """
    if infos and (key := infos[0].key).layers.covers(layers) and key.heads == heads:
        return [Take(infos[0], layers, key.heads)]  # the usual case
    takes: list[Take] = []
    layer = layers.start
    while layer < layers.stop:
        row = _row(infos, layer, heads)
        if row is None:
            raise LookupError(f"layer {layer} is not stored with heads {heads}")
        stop = min(layers.stop, *(info.key.layers.stop for info, _ in row))
        takes += [Take(info, Span(layer, stop), part) for info, part in row]
        layer = stop
    return takes


def bitmap(infos: Sequence[ChunkInfo], layers: Span, heads: Span) -> int:
    """Which of ``layers`` can be had with all ``heads``: bit 0 is the first of them."""
    mask = 0
    if all(info.key.heads == heads for info in infos):  # the usual case
        for info in infos:
            first = max(info.key.layers.start, layers.start) - layers.start
            stop = min(info.key.layers.stop, layers.stop) - layers.start
            mask |= (1 << stop) - (1 << first) if first < stop else 0
        return mask
    for layer in layers:
        mask |= (_row(infos, layer, heads) is not None) << (layer - layers.start)
    return mask


def _row(
    infos: Sequence[ChunkInfo], layer: int, heads: Span
) -> list[tuple[ChunkInfo, Span]] | None:
    """The objects that together have ``heads`` of one layer, each with its share; None: a miss."""
    row: list[tuple[ChunkInfo, Span]] = []
    head = heads.start
    while head < heads.stop:
        able = [i for i in infos if layer in i.key.layers and head in i.key.heads]
        if not able:
            return None
        # The first that goes all the way, else the one that goes furthest.
        best = max(able, key=lambda info: min(info.key.heads.stop, heads.stop))
        stop = min(best.key.heads.stop, heads.stop)
        row.append((best, Span(head, stop)))
        head = stop
    return row

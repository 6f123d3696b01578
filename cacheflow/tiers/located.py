"""What one tier has of a request's chunks, as objects to read and as bitmaps for the scheduler.

Trusts a backend's headers only as far as they fit the engine's layout and what the reader asks for:
model, tenant, authentication, no loss. Reads no payload.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, IntegrityError
from cacheflow.kv import Stamp, check_layout, check_stamp
from cacheflow.types import Coverage, ObjectKind, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo, ChunkKey, KVLayout

__all__ = ["Located", "locate"]

_log = logging.getLogger(__name__)
_ANYBODY: Final = Stamp()
_MOST_SHRUNK: Final = 6
"""No layer counts as less than this fraction of its raw size: a load needs room for what comes out
of it as well."""


@dataclass(frozen=True, slots=True)
class Located:
    """Objects of one channel per chunk of a request (empty: a miss)."""

    channel: str
    chunks: tuple[tuple[ChunkInfo, ...], ...]

    @property
    def found(self) -> int:
        """Chunks of which anything is there."""
        return sum(1 for infos in self.chunks if infos)

    @property
    def reach(self) -> int:
        """Chunks up to and including the last one of which anything is there."""
        return max((i + 1 for i, infos in enumerate(self.chunks) if infos), default=0)

    def coverage(self, layout: KVLayout) -> Coverage:
        """Bitmaps of layers per chunk, and what a layer of one takes on the way, on average."""
        return Coverage(
            channel=self.channel,
            layers=tuple(_bitmap(infos) for infos in self.chunks),
            stride=self._stride(layout.layer_stride()),
        )

    def _stride(self, raw: int) -> int:
        infos = [info for infos in self.chunks for info in infos]
        layers = sum(len(info.key.layers) for info in infos)
        stored = sum(info.nbytes - info.payload_offset for info in infos)
        return max(-(-stored // layers), raw // _MOST_SHRUNK) if layers else raw

    def pieces(self, chunk: int, layers: Span) -> list[tuple[ChunkInfo, Span]]:
        """The objects that together hold ``layers`` of ``chunk``, with the layers to take of each.

        Raises:
            LookupError: some layer is in no object (the caller asked beyond the coverage).
        """
        pieces: list[tuple[ChunkInfo, Span]] = []
        layer = layers.start
        while layer < layers.stop:
            info = next((i for i in self.chunks[chunk] if layer in i.key.layers), None)
            if info is None:
                raise LookupError(f"{self.channel}: layer {layer} of chunk {chunk} is not stored")
            stop = min(layers.stop, info.key.layers.stop)
            pieces.append((info, Span(layer, stop)))
            layer = stop
        return pieces


async def locate(
    channel: str,
    backend: StorageBackend,
    keys: Sequence[ChunkKey],
    layout: KVLayout,
    stamp: Stamp = _ANYBODY,
    *,
    allow_lossy: bool = False,
) -> Located:
    """Ask ``backend`` for all chunks at once and keep the objects this engine can use.

    ``stamp``: whose they have to be. Without ``allow_lossy`` what a lossy codec has touched is not
    taken.

    Raises:
        BackendError: the lookup failed as a whole, or answered something else than was asked.
    """
    found = await backend.lookup(keys)
    if len(found) != len(keys):
        reason = f"{len(found)} answers to {len(keys)} keys"
        raise BackendError(reason, operation="lookup", context=channel)

    def all_usable() -> tuple[tuple[ChunkInfo, ...], ...]:
        pairs = zip(keys, found, strict=True)
        return tuple(tuple(_usable(*pair, layout, stamp, allow_lossy)) for pair in pairs)

    if stamp.auth is None:
        return Located(channel, all_usable())
    return Located(channel, await asyncio.to_thread(all_usable))  # hashes every header


def _usable(
    key: ChunkKey, infos: Sequence[ChunkInfo], layout: KVLayout, stamp: Stamp, allow_lossy: bool
) -> list[ChunkInfo]:
    usable = []
    for info in infos:
        try:
            if info.key.chunk != key:
                raise IntegrityError(f"it is not of {key!r}")
            check_layout(info, layout)
            check_stamp(info, stamp)
        except IntegrityError as error:
            _log.warning("object %r is ignored: %s", info.key, error)
            continue
        if info.lossy and not allow_lossy:
            continue
        if info.key.kind is ObjectKind.KV and info.key.heads == Span(0, layout.num_kv_heads):
            usable.append(info)
    return usable


def _bitmap(infos: Sequence[ChunkInfo]) -> int:
    mask = 0
    for info in infos:
        mask |= (1 << info.key.layers.stop) - (1 << info.key.layers.start)
    return mask

"""What one tier has of a request's chunks, as objects to read and as bitmaps for the scheduler.

Trusts a backend's headers only as far as they fit the engine's layout and what the reader asks for:
model, tenant, authentication, no loss. A rank that holds a part of the model's KV takes what it
needs out of whatever objects have it. Reads no payload.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, IntegrityError
from cacheflow.kv import Stamp, check_layout, check_stamp
from cacheflow.tiers.covering import bitmap, cover
from cacheflow.types import Coverage, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.tiers.covering import Take
    from cacheflow.types import ChunkInfo, ChunkKey, KVLayout, Load, Span

__all__ = ["Located", "locate"]

_log = logging.getLogger(__name__)
_ANYBODY: Final = Stamp()
_MOST_SHRUNK: Final = 6
"""No layer counts as less than this fraction of its raw size: a load needs room for what comes out
of it as well."""


@dataclass(frozen=True, slots=True)
class Located:
    """Objects of one channel per chunk of a request (empty: a miss), for a rank with ``shard``."""

    channel: str
    chunks: tuple[tuple[ChunkInfo, ...], ...]
    shard: Shard
    whole_blocks: bool = False
    """Blocks are authenticated, so a layer has to be read with all of its object's heads."""
    hidden: Located | None = None
    """Boundary activations, of a stage that needs some."""

    @property
    def found(self) -> int:
        """Chunks of which anything is there."""
        return sum(1 for infos in self.chunks if infos)

    @property
    def reach(self) -> int:
        """Chunks up to and including the last one of which anything is there."""
        return max((i + 1 for i, infos in enumerate(self.chunks) if infos), default=0)

    def coverage(self) -> Coverage:
        """Bitmaps of the rank's layers per chunk, and what a layer of one takes on the way, on
        average."""
        shard, hidden = self.shard, self.hidden
        return Coverage(
            channel=self.channel,
            layers=tuple(bitmap(infos, shard.layers, shard.heads) for infos in self.chunks),
            stride=self._stride(shard.layout.layer_stride()),
            hidden=() if hidden is None else tuple(map(bool, hidden.chunks)),
            hidden_stride=0 if hidden is None else hidden.coverage().stride,
        )

    def of(self, load: Load) -> Located:
        """Where what ``load`` is about is."""
        if not load.hidden:
            return self
        assert self.hidden is not None, "an activation is loaded where there are some"
        return self.hidden

    def _stride(self, raw: int) -> int:
        infos = [info for infos in self.chunks for info in infos]
        if any(info.key.heads != self.shard.heads for info in infos):
            return raw  # of other layouts: roughly
        layers = sum(len(info.key.layers) for info in infos)
        stored = sum(info.nbytes - info.payload_offset for info in infos)
        return max(-(-stored // layers), raw // _MOST_SHRUNK) if layers else raw

    def takes(self, chunk: int, layers: Span) -> list[Take]:
        """What to take of which objects, so that together it is the rank's ``layers`` of ``chunk``.

        Raises:
            LookupError: some layer is in no object (the caller asked beyond the coverage).
        """
        try:
            return cover(self.chunks[chunk], self.shard.absolute(layers), self.shard.heads)
        except LookupError as error:
            raise LookupError(f"{self.channel}: chunk {chunk}: {error}") from None


async def locate(
    channel: str,
    backend: StorageBackend,
    keys: Sequence[ChunkKey],
    holding: KVLayout | Shard,
    stamp: Stamp = _ANYBODY,
    *,
    allow_lossy: bool = False,
    boundary: Shard | None = None,
    grid_id: str = "",
) -> Located:
    """Ask ``backend`` for all chunks at once and keep the objects this engine can use.

    ``holding``: the engine's layout, or the part of the model's that it has. ``stamp``: whose they
    have to be. Without ``allow_lossy`` what a lossy codec has touched is not
    taken. ``boundary``: activations that a stage is fed with; only those from which recompute under
    ``grid_id`` repeats the bits.

    Raises:
        BackendError: the lookup failed as a whole, or answered something else than was asked.
    """
    shard = holding if isinstance(holding, Shard) else Shard.of(holding)
    found = await backend.lookup(keys)
    if len(found) != len(keys):
        reason = f"{len(found)} answers to {len(keys)} keys"
        raise BackendError(reason, operation="lookup", context=channel)

    def all_usable(part: Shard) -> tuple[tuple[ChunkInfo, ...], ...]:
        pairs = zip(keys, found, strict=True)
        return tuple(tuple(_usable(*pair, part, stamp, allow_lossy)) for pair in pairs)

    def located() -> Located:
        whole_blocks, hidden = stamp.auth is not None, None
        if boundary is not None:
            exact = tuple(
                tuple(info for info in infos if info.is_repeated(grid_id))
                for infos in all_usable(boundary)
            )
            hidden = Located(channel, exact, boundary, whole_blocks)
        return Located(channel, all_usable(shard), shard, whole_blocks, hidden)

    # Authentication hashes every header.
    return located() if stamp.auth is None else await asyncio.to_thread(located)


def _usable(
    key: ChunkKey, infos: Sequence[ChunkInfo], shard: Shard, stamp: Stamp, allow_lossy: bool
) -> list[ChunkInfo]:
    usable = []
    for info in infos:
        if info.key.kind is not shard.kind:
            continue
        try:
            if info.key.chunk != key:
                raise IntegrityError(f"it is not of {key!r}")
            check_layout(info, shard.whole)
            check_stamp(info, stamp)
        except IntegrityError as error:
            _log.warning("object %r is ignored: %s", info.key, error)
            continue
        if info.lossy and not allow_lossy:
            continue
        if not _overlap(info.key.layers, shard.layers):
            continue
        if _overlap(info.key.heads, shard.heads):
            usable.append(info)
    # What is cut as the rank needs it first: it is read in one piece.
    return sorted(usable, key=lambda info: info.key.heads != shard.heads)


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.stop and other.start < one.stop

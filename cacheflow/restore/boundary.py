"""The way back of a pipeline stage: its KV like anybody's, and the boundary activations beside it.

An activation is an object of its own kind under the chunk's key, sealed, queued and counted like
KV. Stored are those of whole, canonical tiles that a plausible restore would recompute, so that
recompute from them repeats the bits; none where their bytes do not pay.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, cast

from cacheflow.abc import Decoder
from cacheflow.distributed.stages import StageCosts, worth_storing
from cacheflow.kv import canonical_tokens
from cacheflow.restore.saver import Saver
from cacheflow.tasks import to_the_end
from cacheflow.tiers.staged import StagedCopies

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cacheflow.abc import Engine, Staged, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.kv import Stamp
    from cacheflow.memory import StagingPool
    from cacheflow.restore.writes import Saved
    from cacheflow.types import ChunkKey, Observer, Segment, Shard, StagedPart

__all__ = ["StageSaver", "WorthStoring"]


class WorthStoring:
    """How many leading chunks of a prefix should have their activation stored, by what is known of
    compute and channels; all while nothing is known, if they are smaller than the KV they save."""

    def __init__(
        self, engine: Engine, compute: ComputeModel, channels: Sequence[ChannelModel]
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._channels = channels

    def __call__(self, chunks: int, boundary: Shard) -> int:
        layout, grid = self._engine.layout, self._engine.grid
        kv, hidden = layout.payload_bytes(), boundary.layout.payload_bytes()
        speeds = [channel.bandwidth for channel in self._channels]
        speed = sum(each or 0.0 for each in speeds)
        if not (self._compute.known and speed and None not in speeds):
            return chunks if hidden < kv else 0
        tiles = grid.split(0, chunks * layout.chunk_tokens)
        counts = [tile.width // layout.chunk_tokens for tile in tiles]
        costs = StageCosts(
            [layout.num_layers * (self._compute.layer_seconds(tile) or 0.0) for tile in tiles],
            [count * kv / speed for count in counts],
            [count * hidden / speed for count in counts],
        )
        return sum(counts[: worth_storing(costs)])


class StageSaver(Saver):
    """A saver that stores what ``engine`` was fed with as well. ``worth``: how much of it."""

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        clock: Clock,
        observer: Observer,
        staged: StagedCopies,
        *,
        worth: WorthStoring,
        **options: Any,
    ) -> None:
        super().__init__(engine, channels, pool, clock, observer, staged, **options)
        self._stage = cast("Staged", engine)
        self._worth = worth
        self._tiers = tuple(channels)
        self._copies = StagedCopies(channels)
        options.pop("policy", None)
        source = cast("Engine", _Activations(engine))
        self._hidden = Saver(source, channels, pool, clock, observer, self._copies, **options)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._hidden.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await to_the_end(self._hidden.__aexit__(*exc_info))
        finally:
            await self._copies.aclose()
            await super().__aexit__(*exc_info)

    def save(
        self, request_id: str, keys: Sequence[ChunkKey], stamp: Stamp | None = None
    ) -> dict[str, Saved]:
        saved = super().save(request_id, keys, stamp)
        boundary = self._stage.boundary
        if boundary is not None:
            canonical = canonical_tokens(self._engine.segments(request_id), self._engine.grid)
            most = min(canonical // self._engine.layout.chunk_tokens, len(keys))
            most = self._worth(most, boundary)
            chunks = [i for i in self._stage.boundary_chunks(request_id) if i < most]
            wanted = dict.fromkeys(self._tiers, chunks)
            self._hidden.promote(request_id, keys, wanted, stamp)
        return saved

    async def flush(self, timeout: float | None = None) -> bool:
        return all(await asyncio.gather(super().flush(timeout), self._hidden.flush(timeout)))

    async def release(self, request_ids: Collection[str], patience: float = 0.0) -> None:
        await asyncio.gather(
            super().release(request_ids, patience), self._hidden.release(request_ids, patience)
        )


class _Activations:
    """An engine whose "KV" is what it was fed with: all that a saver asks of one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stage = cast("Staged", engine)
        boundary = self._stage.boundary
        assert boundary is not None, "the first stage has none"
        self.shard = boundary
        self.layout = boundary.layout
        self.grid = engine.grid
        self.grid_id = engine.grid_id

    @property
    def is_decoding(self) -> bool:
        return isinstance(self._engine, Decoder) and self._engine.is_decoding

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        return self._engine.segments(request_id)

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        await self._stage.export_hidden(request_id, parts)

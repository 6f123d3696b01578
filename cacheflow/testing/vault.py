"""A cold run's KV, kept aside as bytes, to be stored again in any shape of holes and shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.kv import canonical_tokens, chunk_keys, clip_segments, key_root, seal
from cacheflow.memory import buffer_from
from cacheflow.types import PAGE, ObjectKey, Shard, Span, StagedPart, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.types import ChunkKey, KVLayout, Segment

__all__ = ["Vault"]


class Vault:
    """Payloads of the whole chunks of one request, taken by :meth:`take`."""

    def __init__(
        self,
        layout: KVLayout,
        keys: Sequence[ChunkKey],
        payloads: Sequence[bytearray],
        segments: tuple[Segment, ...],
        canonical: int,
        grid_id: str,
    ) -> None:
        self.layout = layout
        self.keys = keys
        self.payloads = payloads
        self.segments = segments
        self.canonical = canonical
        """Leading tokens that were computed on grid tiles."""
        self._grid_id = grid_id

    @classmethod
    async def take(cls, engine: Engine, request_id: str, tokens: Sequence[int]) -> Vault:
        """Copy every whole chunk of an open, computed request out of the engine."""
        keys = chunk_keys(key_root(engine.identity), tokens, engine.layout.chunk_tokens)
        whole = Span(0, engine.layout.num_layers)
        payloads = []
        for chunk in range(len(keys)):
            payload = bytearray(engine.layout.payload_bytes())
            await engine.capture(request_id, [StagedPart(chunk, whole, memoryview(payload))])
            payloads.append(payload)
        segments = engine.segments(request_id)
        canonical = canonical_tokens(segments, engine.grid)
        return cls(engine.layout, keys, payloads, segments, canonical, engine.grid_id)

    async def put(
        self,
        backend: StorageBackend,
        chunk: int,
        layers: Span | None = None,
        heads: Span | None = None,
    ) -> None:
        """Store ``layers`` and ``heads`` (default: all) of one chunk as an object of its own."""
        whole, size = Shard.of(self.layout), self.layout.chunk_tokens
        shard = Shard(self.layout, layers or whole.layers, heads or whole.heads)
        payload = self._payload(chunk, shard)
        info, header = seal(
            ObjectKey(self.keys[chunk], shard.layers, shard.heads),
            self.layout,
            memoryview(payload),
            grid_id=self._grid_id,
            segments=clip_segments(self.segments, Span(chunk * size, (chunk + 1) * size)),
            canonical=(chunk + 1) * size <= self.canonical,
        )
        await backend.store([Write(info, (buffer_from(header), buffer_from(payload)))])

    def _payload(self, chunk: int, shard: Shard) -> bytearray:
        """What an object with that part of the chunk holds."""
        run, heads = self.layout.head_bytes, self.layout.num_kv_heads
        payload = bytearray()
        for layer in shard.layers:
            for half in range(2):
                first = layer * self.layout.layer_stride() + half * heads * run
                first += shard.heads.start * run
                payload += self.payloads[chunk][first : first + len(shard.heads) * run]
            payload += bytes(-len(payload) % PAGE)
        return payload

    def differing_bytes(self, other: Vault, chunks: int) -> int:
        """How many payload bytes of the first ``chunks`` chunks differ."""
        return sum(
            sum(a != b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(self.payloads[:chunks], other.payloads[:chunks], strict=True)
            if mine != theirs
        )

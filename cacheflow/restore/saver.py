"""The way back: whole chunks of a request's KV, sealed with their provenance, into every tier.

The canonical copy of a chunk wins its key: it replaces another one and is never replaced.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import BackendError
from cacheflow.kv import canonical_tokens, clip_segments, seal
from cacheflow.memory import buffer_from
from cacheflow.restore.tasks import to_the_end
from cacheflow.types import ObjectKey, Span, StagedPart, StoreEnded, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import Lease, StagingPool
    from cacheflow.types import ChunkKey, Observer, Segment

__all__ = ["STAGING_OWNER", "Saved", "Saver"]

_log = logging.getLogger(__name__)
STAGING_OWNER = "being stored"
"""Name under which the staging pool counts what is being stored."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save did, in chunks of one channel."""

    stored: int = 0
    kept: int = 0
    """Already there, at least as good."""
    dropped: int = 0
    """Refused by a cap or failed; counted, logged, and recomputed when needed."""


class Saver:
    """Stores the KV of open requests. One chunk is staged at a time, so memory stays bounded."""

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._channels = channels
        self._pool = pool
        self._clock = clock
        self._observer = observer
        self._sealers = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-seal")

    def close(self) -> None:
        """No save is running any more."""
        self._sealers.shutdown(wait=False)

    async def save(self, request_id: str, keys: Sequence[ChunkKey]) -> dict[str, Saved]:
        """Store the chunks called ``keys`` (the leading whole chunks whose KV is complete).

        A tier that fails loses its copies, not the others': see :class:`Saved`.
        """
        segments = self._engine.segments(request_id)
        return {
            name: await self._save_to(name, backend, request_id, keys, segments)
            for name, backend in self._channels.items()
        }

    async def _save_to(
        self,
        name: str,
        backend: StorageBackend,
        request_id: str,
        keys: Sequence[ChunkKey],
        segments: tuple[Segment, ...],
    ) -> Saved:
        try:
            wanted = await self._wanted(backend, keys, segments)
        except (BackendError, OSError) as error:
            _log.warning("tier %s: lookup before storing failed, nothing stored: %s", name, error)
            return Saved(dropped=len(keys))
        stored = dropped = 0
        for chunk in wanted:
            if await self._save_chunk(name, backend, request_id, keys[chunk], chunk, segments):
                stored += 1
            else:
                dropped += 1
        return Saved(stored, len(keys) - len(wanted), dropped)

    async def _wanted(
        self, backend: StorageBackend, keys: Sequence[ChunkKey], segments: Sequence[Segment]
    ) -> list[int]:
        """Chunks that are not stored, or stored from another history while ours is canonical."""
        whole = Span(0, self._engine.layout.num_layers)
        canonical = canonical_tokens(segments, self._engine.grid)
        wanted = []
        for chunk, infos in enumerate(await backend.lookup(keys)):
            ours = (chunk + 1) * self._engine.layout.chunk_tokens <= canonical
            good = [i for i in infos if i.key.layers == whole and i.layout == self._engine.layout]
            if not good or (ours and not any(i.canonical for i in good)):
                wanted.append(chunk)
        return wanted

    async def _save_chunk(
        self,
        name: str,
        backend: StorageBackend,
        request_id: str,
        key: ChunkKey,
        chunk: int,
        segments: tuple[Segment, ...],
    ) -> bool:
        layout, start = self._engine.layout, self._clock.now()
        with await self._pool.lease(layout.payload_bytes(), STAGING_OWNER) as lease:
            part = StagedPart(chunk, Span(0, layout.num_layers), lease.view)
            capture = asyncio.ensure_future(self._engine.capture(request_id, [part]))
            await to_the_end(capture)
            write = await self._seal(key, chunk, lease, segments)
            try:
                result = (await backend.store([write]))[0]
                outcome, reason = result.status.value, str(result.error or "")
            except (BackendError, OSError) as error:
                outcome, reason = TransferStatus.FAILED.value, str(error)
        ok = outcome == TransferStatus.OK
        if not ok:
            _log.warning("tier %s: chunk %d was not stored (%s: %s)", name, chunk, outcome, reason)
        stop = self._clock.now()
        self._observer(StoreEnded(name, 1, write.nbytes, start, stop, outcome))
        return ok

    async def _seal(
        self, key: ChunkKey, chunk: int, lease: Lease, segments: tuple[Segment, ...]
    ) -> Write:
        layout = self._engine.layout
        tokens = Span(chunk * layout.chunk_tokens, (chunk + 1) * layout.chunk_tokens)
        name = ObjectKey(key, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
        canonical = tokens.stop <= canonical_tokens(segments, self._engine.grid)

        def work() -> Write:
            info, header = seal(
                name,
                layout,
                lease.view,
                grid_id=self._engine.grid_id,
                segments=clip_segments(segments, tokens),
                canonical=canonical,
            )
            return Write(info, (buffer_from(header), lease.buffer))

        sealing = asyncio.get_running_loop().run_in_executor(self._sealers, work)
        return await to_the_end(asyncio.ensure_future(sealing))

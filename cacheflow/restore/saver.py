"""The way back: whole chunks of a request's KV, sealed with their provenance, into every tier.

The canonical copy of a chunk wins its key: it replaces another one and is never replaced.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import ClosedError
from cacheflow.kv import canonical_tokens, clip_segments, seal
from cacheflow.memory import buffer_from
from cacheflow.restore.tasks import to_the_end
from cacheflow.types import (
    LoadOutcome,
    ObjectKey,
    Span,
    StagedPart,
    StoreEnded,
    TransferStatus,
    Write,
)

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
    """Stores the KV of open requests. One chunk is staged at a time, so memory stays bounded.

    ``deadline``: seconds after which a tier that has not answered gets nothing more in that save.
    """

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        clock: Clock,
        observer: Observer,
        deadline: float = 30.0,
    ) -> None:
        self._engine = engine
        self._channels = channels
        self._pool = pool
        self._clock = clock
        self._observer = observer
        self._deadline = deadline
        self._sealers = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-seal")
        self._closed = False

    def close(self) -> None:
        """Saves that still run end with ClosedError."""
        self._closed = True
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
        save = _Save(name, backend, request_id, segments, self._canonical_chunks(segments))
        with self._turns.watch(name, keys) as turns:
            try:
                async with asyncio.timeout(self._deadline):
                    wanted = await self._wanted(save, keys)
            except Exception as error:  # a third party's backend may raise anything: none is stored
                why = str(error) or type(error).__name__
                _log.warning("tier %s: lookup before storing failed, nothing stored: %s", name, why)
                return Saved(dropped=len(keys))
            stored, kept = 0, len(keys) - len(wanted)
            for chunk in wanted:
                outcome = await self._save_in_turn(save, keys[chunk], chunk, turns[chunk])
                stored += outcome == TransferStatus.OK
                kept += outcome == _KEPT
                if outcome == LoadOutcome.LATE:
                    break
        return Saved(stored, kept, len(keys) - stored - kept)

    def _canonical_chunks(self, segments: Sequence[Segment]) -> int:
        return canonical_tokens(segments, self._engine.grid) // self._engine.layout.chunk_tokens

    async def _wanted(self, save: _Save, keys: Sequence[ChunkKey]) -> list[int]:
        """Chunks that are not stored, or stored from another history while ours is canonical."""
        whole = Span(0, self._engine.layout.num_layers)
        wanted = []
        for chunk, infos in enumerate(await save.backend.lookup(keys)):
            good = [i for i in infos if i.key.layers == whole and i.layout == self._engine.layout]
            if not good or (save.is_canonical(chunk) and not any(i.canonical for i in good)):
                wanted.append(chunk)
        return wanted

    async def _save_in_turn(self, save: _Save, key: ChunkKey, chunk: int, turn: Turn) -> str:
        """How it ended: a :class:`TransferStatus`, late, or kept."""
        try:
            async with asyncio.timeout(self._deadline):
                await turn.begin()
        except TimeoutError:
            self._ended(save, chunk, 0, self._clock.now(), LATE, "another save still stores it")
            return LATE
        if turn.is_kept(save.is_canonical(chunk)):
            turn.end()
            return _KEPT
        return await self._save_chunk(save, key, chunk, turn)

    async def _save_chunk(self, save: _Save, key: ChunkKey, chunk: int, turn: Turn) -> str:
        layout, start = self._engine.layout, self._clock.now()
        nbytes = layout.payload_bytes()
    async def _store(self, backend: StorageBackend, write: Write) -> tuple[str, str]:
        try:
            async with asyncio.timeout(self._deadline):
                result = (await backend.store([write]))[0]
        except TimeoutError:
            reason = f"not there after {self._deadline:g} s (setting load_deadline)"
            return LoadOutcome.LATE.value, reason
        except Exception as error:  # a third party's backend may raise anything: a dropped chunk
            return TransferStatus.FAILED.value, str(error) or type(error).__name__
        return result.status.value, str(result.error or "")

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

        if self._closed:
            raise ClosedError("CacheFlow was closed during a save")
        sealing = asyncio.get_running_loop().run_in_executor(self._sealers, work)
        return await to_the_end(asyncio.ensure_future(sealing))

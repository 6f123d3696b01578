"""The way back: whole chunks of a request's KV, sealed with their provenance, into every tier.

The canonical copy of a chunk wins its key: it replaces another one and is never replaced (by saves
of this process; those of others into a shared tier are not seen).
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ClosedError
from cacheflow.kv import Stamp, canonical_tokens, clip_segments, exact_tokens, seal
from cacheflow.memory import buffer_from
from cacheflow.restore.tasks import to_the_end
from cacheflow.restore.turns import Turns
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
    from cacheflow.restore.turns import Turn
    from cacheflow.types import ChunkKey, Observer, Segment

__all__ = ["STAGING_OWNER", "Saved", "Saver"]

_log = logging.getLogger(__name__)
_KEPT: Final = "kept"
"""Another save stored a copy at least as good while this one waited."""
_NOBODY: Final = Stamp()
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


@dataclass(frozen=True, slots=True)
class _Save:
    """One save into one tier."""

    tier: str
    backend: StorageBackend
    request_id: str
    segments: tuple[Segment, ...]
    canonical_chunks: int

    def is_canonical(self, chunk: int) -> bool:
        return chunk < self.canonical_chunks


class Saver:
    """Stores the KV of open requests. One chunk is staged at a time, so memory stays bounded.

    ``deadline``: seconds after which a tier that has not answered gets nothing more in that save.
    ``stamp``: who stores, written into every chunk.
    """

    def __init__(
        self,
        engine: Engine,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        clock: Clock,
        observer: Observer,
        deadline: float = 30.0,
        stamp: Stamp = _NOBODY,
    ) -> None:
        self._engine = engine
        self._channels = channels
        self._pool = pool
        self._clock = clock
        self._observer = observer
        self._deadline = deadline
        self._stamp = stamp
        self._sealers = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-seal")
        self._turns = Turns()
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
        start, lease = self._clock.now(), None
        try:
            async with asyncio.timeout(self._deadline):
                await turn.begin()
        except TimeoutError:
            return self._late(save, chunk, start, "another save of it has not ended")
        try:
            if turn.is_kept(save.is_canonical(chunk)):
                return _KEPT
            try:
                async with asyncio.timeout(self._deadline):
                    lease = await self._pool.lease(
                        self._engine.layout.payload_bytes(), STAGING_OWNER
                    )
            except TimeoutError:
                return self._late(save, chunk, start, "no staging memory came free")
            with lease:
                write = await self._capture(save, key, chunk, lease)
                return await self._store_in_turn(save, chunk, write, start, turn)
        finally:
            self._turns.end(save.tier, key, lease.hold if lease else None)

    async def _store_in_turn(
        self, save: _Save, chunk: int, write: Write, start: float, turn: Turn
    ) -> str:
        may_be_there = True
        try:
            outcome, reason = await self._store(save.backend, write)
            may_be_there = outcome in (TransferStatus.OK, LoadOutcome.LATE)
        finally:
            if may_be_there:
                turn.stored(save.is_canonical(chunk))
        self._ended(save, chunk, write.nbytes, start, outcome, reason)
        return outcome

    def _late(self, save: _Save, chunk: int, start: float, reason: str) -> str:
        nbytes = self._engine.layout.payload_bytes()
        self._ended(save, chunk, nbytes, start, LoadOutcome.LATE, reason)
        return LoadOutcome.LATE.value

    def _ended(
        self, save: _Save, chunk: int, nbytes: int, start: float, outcome: str, reason: str
    ) -> None:
        if outcome != TransferStatus.OK:
            _log.warning(
                "tier %s: chunk %d was not stored (%s: %s)", save.tier, chunk, outcome, reason
            )
        stop = self._clock.now()
        self._observer(StoreEnded(save.tier, 1, nbytes, start, stop, outcome))

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

    async def _capture(self, save: _Save, key: ChunkKey, chunk: int, lease: Lease) -> Write:
        """The KV of ``chunk`` out of the engine into ``lease``, sealed."""
        part = StagedPart(chunk, Span(0, self._engine.layout.num_layers), lease.view)
        capturing = self._engine.capture(save.request_id, [part])
        await to_the_end(asyncio.ensure_future(capturing))
        if self._closed:
            raise ClosedError("CacheFlow was closed during a save")
        sealing = asyncio.get_running_loop().run_in_executor(
            self._sealers, self._seal, save, key, chunk, lease
        )
        return await to_the_end(asyncio.ensure_future(sealing))

    def _seal(self, save: _Save, key: ChunkKey, chunk: int, lease: Lease) -> Write:
        layout = self._engine.layout
        tokens = Span(chunk * layout.chunk_tokens, (chunk + 1) * layout.chunk_tokens)
        info, header = seal(
            ObjectKey(key, Span(0, layout.num_layers), Span(0, layout.num_kv_heads)),
            layout,
            lease.view,
            grid_id=self._engine.grid_id,
            segments=clip_segments(save.segments, tokens),
            canonical=save.is_canonical(chunk),
            stamp=self._stamp,
            lossy=tokens.stop > exact_tokens(save.segments, tokens.stop),
        )
        return Write(info, (buffer_from(header), lease.buffer))

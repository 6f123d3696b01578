"""One chunk's KV out of the engine into staging memory, sealed with its provenance.

In pieces, so that the engine may copy for others, and decode, in between; checksums on a thread of
their own.
Does not know who wants the copy.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cacheflow.abc import Sharded
from cacheflow.kv import clip_segments, seal
from cacheflow.memory import buffer_from
from cacheflow.tasks import to_the_end
from cacheflow.tiers.staged import Copy
from cacheflow.types import ObjectKey, Shard, Span, StagedPart, Write

if TYPE_CHECKING:
    from cacheflow.abc import Engine, Recomputer
    from cacheflow.memory import Lease, StagingPool
    from cacheflow.restore.pace import Pace
    from cacheflow.restore.writes import Save

__all__ = ["STAGING_OWNER", "Sealer", "shard_of"]

STAGING_OWNER: Final = "being stored"
"""Name under which the staging pool counts what is being stored."""
_CAPTURE_BYTES: Final = 4 << 20
"""Copied out of the engine in one go: loads of other requests wait for that to end."""
_LEASE_SECONDS: Final = 0.05
"""Wait for staging memory in one go: then look again who needs it most."""


def shard_of(engine: Recomputer) -> Shard:
    """The part of the model's KV that ``engine`` holds."""
    return engine.shard if isinstance(engine, Sharded) else Shard.of(engine.layout)


class Sealer:
    """Makes copies out of ``engine`` in leases of ``pool``, each step in a turn of ``pace``."""

    def __init__(self, engine: Engine, pool: StagingPool, pace: Pace) -> None:
        self._engine = engine
        self._pace = pace
        self._shard = shard_of(engine)
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-seal")

    async def copy(self, save: Save, index: int) -> Copy | None:
        """Chunk ``index`` of ``save``; None when no staging memory came free in a moment.

        Raises:
            ClosedError: the request is not open any more.
            Exception: whatever the engine raised.
        """
        nbytes = self._engine.layout.payload_bytes()
        lease = self._pool.try_lease(nbytes, STAGING_OWNER)
        if lease is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEASE_SECONDS):
                    lease = await self._pool.lease(nbytes, STAGING_OWNER)
        if lease is None:
            return None
        try:
            for part in self._parts(index, lease.view):
                async with self._pace.turn():
                    capturing = self._engine.capture(save.request_id, [part])
                    await to_the_end(capturing)
            async with self._pace.turn():
                sealing = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._seal, save, index, lease
                )
                return Copy(await to_the_end(sealing), lease)
        except BaseException:
            lease.release()
            raise

    def close(self) -> None:
        """Nothing more will be copied."""
        self._thread.shutdown(wait=False)

    def _parts(self, index: int, view: memoryview) -> list[StagedPart]:
        layout = self._engine.layout
        stride, layers = layout.layer_stride(), layout.num_layers
        step = max(_CAPTURE_BYTES // stride, 1)
        spans = [Span(at, min(at + step, layers)) for at in range(0, layers, step)]
        return [StagedPart(index, s, view[s.start * stride : s.stop * stride]) for s in spans]

    def _seal(self, save: Save, index: int, lease: Lease) -> Write:
        layout = self._shard.whole
        tokens = Span(index * layout.chunk_tokens, (index + 1) * layout.chunk_tokens)
        info, header = seal(
            ObjectKey(save.keys[index], self._shard.layers, self._shard.heads, self._shard.kind),
            layout,
            lease.view,
            grid_id=self._engine.grid_id,
            segments=clip_segments(save.segments, tokens),
            canonical=save.is_canonical(index),
            stamp=save.stamp,
            lossy=save.is_lossy(index),
        )
        return Write(info, (buffer_from(header), lease.buffer))

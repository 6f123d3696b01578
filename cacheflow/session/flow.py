"""An engine with its tiers: opens them, knows the sessions, makes keys."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from cacheflow.kv import chunk_keys, extend_keys, key_root
from cacheflow.session.conversation import FORGET_SECONDS, Session
from cacheflow.session.opening import open_parts
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.costs import ComputeModel
    from cacheflow.session.opening import Parts
    from cacheflow.types import ChunkKey, Observer

__all__ = ["TOKENS_IN_ONE_GO", "CacheFlow"]

TOKENS_IN_ONE_GO: Final = 4096
"""Prompt tokens whose keys are made before the event loop goes on: about 0.3 ms."""


class CacheFlow:
    """Owns the backends, the staging pool and the restorer of one engine. Use :meth:`open`."""

    def __init__(self, settings: Settings, engine: Engine, parts: Parts) -> None:
        self.settings = settings
        self.engine = engine
        self.backends = parts.backends
        self.restorer = parts.restorer
        self.clock = parts.clock
        self._saver = parts.saver
        self._sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """Known as long as anybody, or :attr:`_resident`, has them."""
        self._resident: set[Session] = set()
        """Sessions with KV in memory."""
        self._turns = count(1)
        self._root = key_root(engine.identity, settings.salt_bytes)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings | None = None,
        *,
        engine: Engine,
        backends: Mapping[str, StorageBackend] | None = None,
        observer: Observer | None = None,
        compute: ComputeModel | None = None,
    ) -> AsyncIterator[CacheFlow]:
        """Open the tiers of ``settings`` (or take ``backends``, which stay the caller's).

        ``compute``: what is known of this engine's speed already, and learned on from here; then
        the caller keeps what is learned, and none of it comes from or goes to the cache directory.

        Raises:
            ConfigError: a setting, a tier or the model cannot be used; says which and why.
            IntegrityError: a tier's folder holds something else.
        """
        settings = settings or Settings()
        async with AsyncExitStack() as stack:
            parts = await open_parts(settings, engine, stack, backends, observer, compute)
            flow = cls(settings, engine, parts)
            stack.push_async_callback(flow.forget)
            stack.push_async_callback(flow.flush, settings.flush_seconds)
            yield flow

    def session(self, session_id: str) -> Session:
        """The session called ``session_id``, new or known.

        It stays known while its KV is in memory, or while you hold it.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(self, session_id)
        return session

    def keys(self, tokens: Sequence[int]) -> tuple[ChunkKey, ...]:
        """Keys of the whole chunks of ``tokens`` under this model and salt, all in one go: 128k
        tokens take some 7 ms."""
        return chunk_keys(self._root, tokens, self.engine.layout.chunk_tokens)

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was generated so far is stored, at most ``timeout`` seconds.

        Returns whether it is (or was dropped, and counted); what is not goes on being stored.
        Leaving CacheFlow does this for ``flush_seconds`` and drops the rest.
        """
        return await self._saver.flush(timeout)

    async def forget(self) -> None:
        """Drop the KV of every session from memory, as :meth:`Session.forget` does."""
        sessions = list(self._resident)
        try:
            open_ = [session._request for session in sessions if session._request]
            await self._saver.release(open_, FORGET_SECONDS)
        finally:
            for session in sessions:
                await session._close()

    async def _keys_in_pieces(
        self, tokens: Sequence[int], known: Sequence[ChunkKey]
    ) -> tuple[ChunkKey, ...]:
        """:meth:`keys` without blocking the loop. ``known``: those of the leading chunks."""
        keys, size = list(known), self.engine.layout.chunk_tokens
        while True:
            if extend_keys(keys, self._root, tokens, size, limit=TOKENS_IN_ONE_GO):
                return tuple(keys)
            await asyncio.sleep(0)

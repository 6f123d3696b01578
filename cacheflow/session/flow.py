"""An engine with its tiers: opens them, knows the sessions, makes keys."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from cacheflow.errors import ClosedError, ConfigError
from cacheflow.kv import chunk_keys, extend_keys
from cacheflow.session.background import Background
from cacheflow.session.carrying import load_session, read_tokens
from cacheflow.session.common import in_common
from cacheflow.session.decoding import DecodeLoop
from cacheflow.session.opening import open_parts
from cacheflow.session.prompts import agreeing_keys, folder, seconds, whole_number
from cacheflow.session.session import Session
from cacheflow.session.tenants import Tenant, tenant_of
from cacheflow.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.costs import ComputeModel
    from cacheflow.session.common import Place
    from cacheflow.session.opening import Parts
    from cacheflow.session.resident import Resident
    from cacheflow.types import ChunkKey, Observer

__all__ = ["TOKENS_IN_ONE_GO", "CacheFlow"]

TOKENS_IN_ONE_GO: Final = 4096
"""Prompt tokens whose keys are made before the event loop goes on: about 0.3 ms."""
_REMEMBERED: Final = 1 << 16
"""Names of sessions of which it is known how many requests they have had."""


class CacheFlow:
    """Owns the backends, the staging pool and the restorer of one engine. Use :meth:`open`."""

    def __init__(self, settings: Settings, engine: Engine, parts: Parts, place: Place) -> None:
        self.settings = settings
        self.engine = engine
        self.backends = parts.backends
        self.restorer = parts.restorer
        self.clock = parts.clock
        self.saver = parts.saver
        self.decoding = DecodeLoop(engine)
        self._sessions: WeakValueDictionary[tuple[str, str], Session] = WeakValueDictionary()
        """By tenant and id; known as long as anybody, or one of the sets here, has them."""
        self._resident: set[Session] = set()
        """Sessions with KV in memory."""
        self._background = Background(parts.clock)
        self._place = place
        self.room = place.room
        self.is_closed = False
        """Whether it has been left: nothing new begins."""
        self._numbers = count(1)
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._most_turns = 0
        self._tenant = tenant_of("", settings, engine)

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

        ``settings``: None for those of the environment (``CACHEFLOW_*``). ``engine`` stays the
        caller's, who closes it afterwards. ``observer`` is told every event on the event loop
        (:mod:`cacheflow.metrics` has some); what it raises is logged and reaches no request.
        ``compute``: what is known of this engine's speed already, and learned on from here; then
        the caller keeps what is learned, and none of it comes from or goes to the cache directory.

        Several may be open over one engine, on one event loop; over an engine of several ranks one
        at a time.

        Raises:
            ConfigError: a setting, a tier, the model or the engine cannot be used; says which and
                why.
            IntegrityError: a tier's folder holds something else.
        """
        settings = settings or Settings()
        async with AsyncExitStack() as stack:
            place = stack.enter_context(in_common(engine))
            parts = await open_parts(settings, engine, stack, backends, observer, compute)
            flow = cls(settings, engine, parts, place)
            await stack.enter_async_context(flow._background.running())
            await stack.enter_async_context(flow.decoding.running())
            stack.push_async_callback(flow.forget)
            stack.callback(flow._leave)
            stack.push_async_callback(flow.flush, settings.flush_seconds)
            yield flow

    def session(
        self,
        session_id: str | None = None,
        *,
        tenant: str = "",
        ttl: float | None = None,
        priority: int | None = None,
    ) -> Session:
        """The session of ``tenant`` called ``session_id``, new or known; None: a new one.

        It stays known while its KV is in memory, while you hold it, or for ``ttl`` seconds after
        its last use, when it is closed. ``priority``: of its restores, 0 of a new one. A tenant
        finds nothing of what another one stored. What is said of a known session replaces what was
        said before.

        Raises:
            ConfigError: one of these cannot be.
        """
        known = None
        if isinstance(session_id, str) and isinstance(tenant, str):
            known = self._sessions.get((tenant, session_id))
        if known is None:
            owner = self._tenant if tenant == "" else tenant_of(tenant, self.settings, self.engine)
            return self.new_session(session_id, owner, ttl, 0 if priority is None else priority)
        lives = known.ttl if ttl is None else seconds("ttl", ttl)
        rank = known.priority if priority is None else whole_number("priority", priority)
        known.ttl, known.priority = lives, rank
        self._background.watch(known)
        return known

    async def import_session(
        self,
        path: Path | str,
        session_id: str | None = None,
        *,
        tenant: str = "",
        ttl: float | None = None,
        priority: int = 0,
    ) -> Session:
        """A new session with the history that :meth:`Session.export` wrote into the folder
        ``path``. Its chunks are stored under this flow's and tenant's own keys in the first tier
        that lasts (else in the first one): take only what you trust, or set ``auth_key``.

        Raises:
            ConfigError: it is no such folder, is of another model, or the session exists.
            IntegrityError: it is damaged. A damaged chunk alone is left out, and recomputed.
            ClosedError: CacheFlow is closed.
        """
        self.check_open()
        path = folder("path", path)
        contents = await read_tokens(path, self.engine.identity)
        owner = tenant_of(tenant, self.settings, self.engine)
        keys = await self.keys_in_pieces(owner.root, contents.tokens, ())
        made = self.new_session(session_id, owner, ttl, priority)
        tiers = sorted(self.backends.values(), key=lambda t: not t.capabilities.persistent)
        try:
            if tiers:
                await load_session(path, contents, keys, owner.stamp, tiers[0])
        except BaseException:
            self.discard(made, ())  # its id is free again at once
            raise
        made.begin_with(contents.tokens, keys)
        return made

    def new_session(
        self, session_id: str | None, tenant: Tenant, ttl: float | None, priority: int
    ) -> Session:
        """A session that was not known before; see :meth:`session`.

        Raises:
            ConfigError: there is such a session, or one of these cannot be.
        """
        if session_id is None:
            session_id = f"session-{next(self._numbers)}"
        if not isinstance(session_id, str) or not session_id:
            raise ConfigError(f"a session's id is a text, got {session_id!r}")
        if (tenant.name, session_id) in self._sessions:
            raise ConfigError(f"there is a session {session_id!r} already")
        rank = whole_number("priority", priority)
        made = Session(self, session_id, tenant, seconds("ttl", ttl), rank)
        self._sessions[tenant.name, session_id] = made
        self._background.watch(made)
        return made

    def keys(self, tokens: Sequence[int]) -> tuple[ChunkKey, ...]:
        """Keys of the whole chunks of ``tokens`` under this model and salt, all in one go: 128k
        tokens take some 7 ms."""
        return chunk_keys(self._tenant.root, tokens, self.engine.layout.chunk_tokens)

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was generated so far is stored, at most ``timeout`` seconds.

        Returns whether it is (or was dropped, and counted); what is not goes on being stored.
        Leaving CacheFlow does this for ``flush_seconds`` and drops the rest.

        Raises:
            ConfigError: ``timeout`` is not a number of seconds.
        """
        return await self.saver.flush(seconds("timeout", timeout))

    async def forget(self) -> None:
        """Drop the KV of every session from memory, as :meth:`Session.forget` does: of all at once,
        so that a turn which begins while some of it is still to be copied is none of them."""
        await asyncio.gather(*(each.forget() for each in list(self._resident)))

    def session_counts(self) -> dict[str, int]:
        """How many sessions are known: ``resident`` with KV in memory, ``forgotten`` without."""
        resident = len(self._resident)
        return {"resident": resident, "forgotten": max(len(self._sessions) - resident, 0)}

    # -- for its sessions ----------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedError if CacheFlow has been left."""
        if self.is_closed:
            raise ClosedError("CacheFlow is closed")

    def _leave(self) -> None:
        """Nothing new begins from now on, and nobody waits for memory any more."""
        self.is_closed = True
        self.room.changed()

    def new_request(self, name: str) -> str:
        """An id that no request of this flow, or of another one over its engine, has had. Ranks of
        one model, whose sessions have the same turns in whatever order, name their requests alike:
        each has one flow."""
        number = self._turns.pop(name, self._most_turns) + 1
        self._turns[name] = number
        if len(self._turns) > _REMEMBERED:
            _, turns = self._turns.popitem(last=False)
            self._most_turns = max(self._most_turns, turns)  # where names begin from now on
        return self._place.request(name, number)

    @property
    def residents(self) -> list[Resident]:
        """What sessions hold in KV memory."""
        return [session.resident for session in self._resident]

    def changed(self, session: Session) -> None:
        """The session holds KV memory now, or holds none any more."""
        for known in (self._resident, self._place.resident):
            (known.add if session.requests else known.discard)(session)
        self.room.changed()

    def touched(self, session: Session) -> None:
        """The session was used."""
        self._background.watch(session)

    def discard(self, session: Session, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The session is closed. Returns those of its ``keys`` that no other session has."""
        self._background.forget(session)
        if self._sessions.get((session.tenant, session.id)) is session:
            del self._sessions[session.tenant, session.id]
        others = [each for each in self._sessions.values() if each.tenant == session.tenant]
        return list(keys[max((agreeing_keys(keys, each.keys) for each in others), default=0) :])

    def behind(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` behind the sessions; given up when the flow is closed."""
        self._background.spawn(work)

    async def keys_in_pieces(
        self, root: bytes, tokens: Sequence[int], known: Sequence[ChunkKey]
    ) -> tuple[ChunkKey, ...]:
        """Keys under ``root`` without blocking the loop. ``known``: those of leading chunks."""
        keys, size = list(known), self.engine.layout.chunk_tokens
        while True:
            if extend_keys(keys, root, tokens, size, limit=TOKENS_IN_ONE_GO):
                return tuple(keys)
            await asyncio.sleep(0)

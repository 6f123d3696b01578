"""A session: a conversation that can be forked, cut, carried away, advised about, and ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.session.advice import Advice, State, advice_of, tell_tiers
from cacheflow.session.carrying import save_session
from cacheflow.session.conversation import Conversation
from cacheflow.session.prompts import agreeing, folder, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.session.carrying import Carried
    from cacheflow.types import ChunkKey

__all__ = ["Session"]

_FORGET_SECONDS: Final = 1.0
"""Forgetting waits this long for room to copy what is still to be stored."""


class Session(Conversation):
    """One conversation, made by :meth:`CacheFlow.session`. Its KV stays in memory between turns
    until :meth:`forget`, or until others need the room."""

    async def fork(self, session_id: str | None = None) -> Session:
        """A new session that goes on from here, of the same tenant, with the same history.

        KV in memory is shared, but for a copy of the last page; a turn under way is waited for.

        Raises:
            ConfigError: there is such a session already.
            CapacityError: there is no KV memory for the copy.
        """
        made = self._flow.new_session(session_id, self._tenant, self.ttl, self.priority)
        async with self._alone():
            self._check_open()
            made._history = self._history[:]
            if self._kv.request is not None:
                await made._kv.adopt(self._kv)
            self._touch()
        return made

    async def truncate(self, to: int) -> None:
        """Forget all but the first ``to`` tokens of the history; what is stored stays. A turn under
        way is waited for.

        Raises:
            ConfigError: the history has fewer tokens, or ``to`` is no length.
            CapacityError: there is no KV memory for a copy of a page that is shared.
        """
        to = whole_number("the length to truncate to", to, 0)
        async with self._alone():
            self._check_open()
            if to > len(self._history):
                raise ConfigError(f"{self._kv.name} has {len(self._history)} tokens, not {to}")
            self._joined = None
            kept = min(to, agreeing(self._kv.tokens, self._history))
            await self._kv.cut(kept, _FORGET_SECONDS)
            self._history = self._history[:to]
            self.keys = self.keys[: to // self._flow.engine.layout.chunk_tokens]
            self._touch()

    async def hint(
        self,
        state: State | None = None,
        eta: float | None = None,
        ttl: float | None = None,
        priority: float | None = None,
    ) -> None:
        """Advice about what comes next; it never changes an output.

        ``state``: ``active``, ``waiting`` (for a tool: back in ``eta`` seconds or so), ``idle`` or
        ``done``. It decides whose KV leaves memory first when room is short, and how much the
        stored chunks count against others: ``priority`` times what they seem worth, for ``ttl``
        seconds. With ``waiting`` and ``eta`` they are pinned as well, within ``pin_bytes``.

        Raises:
            ConfigError: there is no such state, or a number is not positive.
        """
        self._advice = advice_of(state, eta, ttl, priority, self._flow.clock.now())
        self._touch()
        await self._tell_tiers(self._advice, self.keys)

    async def export(self, path: Path | str) -> Carried:
        """Write the history, and its chunks as far as they are stored, into the new folder
        ``path``: :meth:`CacheFlow.import_session` takes it up. What is still to be stored is waited
        for, ``flush_seconds`` at most.

        Raises:
            ConfigError: ``path`` exists, or cannot be written.
        """
        path = folder("path", path)
        await self._flow.flush(self._flow.settings.flush_seconds)
        tokens, keys = self._history[:], self.keys
        keys = await self._flow.keys_in_pieces(self._tenant.root, tokens, keys)
        flow = self._flow
        return await save_session(path, tokens, keys, flow.engine.identity, flow.backends)

    def begin_with(self, tokens: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """A new session has this history, none of it in memory."""
        self._history, self.keys = list(tokens), keys

    async def forget(self) -> None:
        """Drop the KV from memory; the history, and what is stored or waits to be, stays.

        What is to be stored and finds no room to wait within a second is dropped, and counted:
        ``flush`` before, if all of it matters. A turn under way ends with a ClosedError.
        """
        await self._kv.drop(_FORGET_SECONDS)

    async def close(self) -> None:
        """The session ends: its KV leaves memory, but for what others share, and the tiers may let
        go first what no other session had. A turn under way ends with a ClosedError. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self._kv.drop(_FORGET_SECONDS)
        finally:
            only_here = self._flow.discard(self, self.keys)
        now = self._flow.clock.now()
        await self._tell_tiers(advice_of("done", None, None, None, now), only_here)

    async def make_way(self) -> None:
        """Drop the KV of an idle session from memory for others."""
        async with self._alone():
            await self._kv.drop()

    async def _tell_tiers(self, advice: Advice, keys: Sequence[ChunkKey]) -> None:
        """Now, and once more when what waits to be stored is stored."""
        tiers = self._flow.backends.values()
        tell_tiers(tiers, keys, advice)
        if not self._flow.saver.is_settled(keys):

            async def later() -> None:
                await self._flow.saver.settled(keys)
                if self._advice is advice or self._closed:
                    tell_tiers(tiers, keys, advice)

            self._flow.behind(later())

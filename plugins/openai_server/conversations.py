"""Which session a request goes on with: conversations by name, by what they hold, or new ones.

Owns the sessions' names and knows what each held in tokens, in memory or not. A conversation is
lent to one request at a time; another request under the same name meanwhile gets a branch of its
own, which shares the memory of what both begin with. Never are two tenants', or two users',
conversations mixed.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from cacheflow.plugins.openai_server.prefix import History, common_tokens, packed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.plugins.openai_server.prefix import Fingerprint
    from cacheflow.session import CacheFlow, Session

__all__ = ["Conversation", "Conversations", "Lent", "Scope"]


@dataclass(frozen=True, slots=True)
class Scope:
    """Who asks, and under which name; conversations are looked for within a scope only."""

    tenant: str
    user: str
    key: str | None
    """None: the client names no conversation; they are told apart by what they hold."""


@dataclass(slots=True, eq=False)
class Conversation:
    """What the server knows of a session."""

    name: str
    scope: Scope
    history: History | None = None
    busy: bool = False
    last_used: int = 0

    def remember(self, prompt: Sequence[int], answer: Sequence[int], made_of: Fingerprint) -> None:
        """The turn is over: this is what the next one is compared with."""
        self.history = History(packed([*prompt, *answer]), len(prompt), made_of)


@dataclass(frozen=True, slots=True)
class Lent:
    """A conversation, and what the prompt was compared with to choose it."""

    conversation: Conversation
    session: Session
    compared: History | None
    """Of the best known conversation of the scope, which may be another one."""
    common: int
    """Tokens that it and the prompt begin with."""


@dataclass(slots=True)
class Conversations:
    """At most ``most`` of them, ``branches`` in a named scope. Used from one event loop."""

    flow: CacheFlow
    most: int
    branches: int
    _scopes: dict[Scope, list[Conversation]] = field(default_factory=dict)
    _turn: count[int] = field(default_factory=lambda: count(1))

    @asynccontextmanager
    async def lend(self, scope: Scope, prompt: Sequence[int]) -> AsyncIterator[Lent]:
        """The conversation that ``prompt`` goes on with, for this request alone."""
        conversation, compared, common = self._choose(scope, packed(prompt))
        conversation.busy = True
        conversation.last_used = next(self._turn)
        try:
            await self._keep_within_bounds()
            yield Lent(conversation, self._session(conversation), compared, common)
        finally:
            conversation.busy = False

    async def expected(self, scope: Scope, prompt: Sequence[int]) -> Session:
        """The session of the conversation that will go on with ``prompt``; not lent, so that the
        request that does may come at any time."""
        conversation, _, _ = self._choose(scope, packed(prompt))
        conversation.last_used = next(self._turn)
        await self._keep_within_bounds()
        return self._session(conversation)

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def _choose(self, scope: Scope, prompt: bytes) -> tuple[Conversation, History | None, int]:
        known = self._scopes.get(scope, [])
        best, common = _best([c for c in known if not c.busy], prompt)
        full = scope.key is not None and len(known) >= self.branches
        compared = best.history if best else None
        if best is not None and (full or _goes_on(best, common)):
            return best, compared, common
        made = Conversation(f"{scope.key or 'anonymous'}#{next(self._turn)}", scope)
        self._scopes.setdefault(scope, []).append(made)
        return made, compared if scope.key else None, common

    def _session(self, conversation: Conversation) -> Session:
        return self.flow.session(conversation.name, tenant=conversation.scope.tenant)

    async def _keep_within_bounds(self) -> None:
        while len(self) > self.most:
            idle = [c for c in self._all() if not c.busy]
            if not idle:
                return
            oldest = min(idle, key=lambda c: c.last_used)
            self._remove(oldest)
            await self._session(oldest).forget()

    def _remove(self, conversation: Conversation) -> None:
        known = self._scopes[conversation.scope]
        known.remove(conversation)
        if not known:
            del self._scopes[conversation.scope]

    def _all(self) -> list[Conversation]:
        return [c for known in self._scopes.values() for c in known]


def _best(idle: list[Conversation], prompt: bytes) -> tuple[Conversation | None, int]:
    """The conversation that has most of ``prompt``, and how many tokens of it."""
    best, most = None, -1
    for conversation in sorted(idle, key=lambda c: c.last_used, reverse=True):
        history = conversation.history
        common = common_tokens(history.tokens, prompt) if history else 0
        if common > most:
            best, most = conversation, common
        if history and common >= history.held_tokens - 1:
            break  # its next turn: the others need not be compared
    return best, max(most, 0)


def _goes_on(conversation: Conversation, common: int) -> bool:
    """A prompt that has half of what the conversation held, or more, is its next turn or an earlier
    one taken back; one that has less is another conversation that begins alike."""
    history = conversation.history
    return history is None or 2 * common >= history.held_tokens

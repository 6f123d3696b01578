"""The turns of one conversation: one at a time, each with the whole history as its prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from cacheflow.errors import ClosedError
from cacheflow.session.advice import Advice
from cacheflow.session.prefetch import Prefetch
from cacheflow.session.prompts import (
    agreeing,
    check_fits,
    check_sampling,
    read_prompt,
    seconds,
    stop_set,
    whole_number,
)
from cacheflow.session.report import report_of
from cacheflow.session.resident import Resident
from cacheflow.session.turn import Ask, Turn
from cacheflow.tasks import Lasting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from cacheflow.session.flow import CacheFlow
    from cacheflow.session.prompts import Prompt
    from cacheflow.session.report import Generation
    from cacheflow.session.session import Session
    from cacheflow.session.tenants import Tenant
    from cacheflow.types import ChunkKey, Sampling

__all__ = ["Conversation"]


class Conversation:
    """What :class:`Session` is made of; see there."""

    def __init__(
        self, flow: CacheFlow, session_id: str, tenant: Tenant, ttl: float | None, priority: int
    ) -> None:
        self.id = session_id
        self.ttl = ttl
        """Seconds without use after which it is closed; None: never."""
        self.priority = priority
        """Of its restores: higher goes before others, whatever the objective."""
        self.used_at = flow.clock.now()
        self._flow = flow
        self._tenant = tenant
        self._history: list[int] = []
        self.keys: Sequence[ChunkKey] = ()
        """Of leading chunks of the history, in memory or not."""
        self._kv = Resident(flow, cast("Session", self))
        self._advice = Advice()
        self._busy = asyncio.Lock()
        self._asking = 0
        """Who is at it or waits to be."""
        self._prefetch: Prefetch | None = None
        self._joined: Turn | None = None
        """A prefetch that a waiting turn has lengthened to its own prompt."""
        self._closed = False

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._tenant.name

    @property
    def tokens(self) -> tuple[int, ...]:
        """The history: the last prompt and what was generated behind it."""
        return tuple(self._history)

    @property
    def resident_tokens(self) -> int:
        """Tokens of this session whose KV is in memory."""
        return len(self._kv.tokens)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being done for it."""
        return not self._asking

    @property
    def is_over(self) -> bool:
        """Whether its flow has been left."""
        return self._flow.is_closed

    @property
    def wanted(self) -> tuple[float, float, float]:
        """How much its KV is wanted in memory: the least is forgotten first when room is short."""
        return (*self._advice.standing(self._flow.clock.now()), self.used_at)

    @property
    def resident(self) -> Resident:
        """What of it is in memory, for its flow."""
        return self._kv

    @property
    def requests(self) -> list[str]:
        """What is open for it in the engine."""
        return self._kv.requests

    def divergence(self, prompt: Sequence[int]) -> int | None:
        """Index of the first token at which ``prompt`` leaves the history; None where it goes on
        from it, or ends before it does."""
        same = agreeing(self._history, prompt)
        return same if same < min(len(self._history), len(prompt)) else None

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int = 128,
        stop_tokens: Collection[int] = (),
        policy: str | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        sampling: Sampling | None = None,
        save: bool = True,
        report: Generation | None = None,
    ) -> AsyncGenerator[int, None]:
        """Tokens after ``prompt`` (the whole history), as they are made.

        ``prompt``: token ids, or chat messages, which the model's template renders together with
        ``tools``; then the template's stop tokens stop as well.

        What is resident is used, what is stored is restored, the rest is computed; afterwards the
        whole chunks of the history are stored behind the request (``save``), where they are found
        at once. Cancelling it, or abandoning the iterator (``aclose``, or the last reference to it
        dropped), keeps the session usable and the KV that is complete; until then the next turn
        waits for it. A prefetch of the same prompt that is under way is waited for.

        ``policy``: instead of the setting's. ``priority``: instead of the session's. ``deadline``:
        seconds from now in which the first token is wanted (objective ``deadline`` serves the
        earliest first). ``sampling``: how tokens are drawn; None: the likeliest, always.

        Raises:
            ConfigError: the prompt is empty, too long for the model, or holds an impossible token,
                or an argument cannot be used.
            CapacityError: the prompt does not fit into the engine's KV memory although no other
                session holds any. While others do, it waits for them.
            ClosedError: the session or CacheFlow is closed, or it was forgotten or closed
                meanwhile.
        """
        self._check_open()
        arrival, report = self._flow.clock.now(), report_of(report)
        new = whole_number("max_new_tokens", max_new_tokens, 1)
        due, stops = seconds("deadline", deadline), stop_set(stop_tokens)
        rank = self.priority if priority is None else whole_number("priority", priority)
        tokens, ends = await read_prompt(prompt, tools, self._flow.engine.chat)
        check_fits(tokens, new, self._flow.engine.max_tokens)
        check_sampling(sampling, self._flow.engine)
        ask = Ask(tokens, arrival, policy, rank, None if due is None else arrival + due, sampling)
        self._overtake(ask)
        async with self._alone():
            before, turn = self._begin(ask, report)
            try:
                await turn.restore(before)
                self._history = list(tokens)
                token = await turn.first()
                while True:
                    self._history.append(token)
                    report.made(token, stops | ends, new)
                    yield token
                    if report.finish_reason is not None:
                        break
                    token = await turn.next(token)
                if save:
                    await turn.save()
            except BaseException as error:
                await turn.broke(error, save=save)
                raise
            finally:
                self._after(turn)

    async def prefetch(
        self,
        prompt: Prompt | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        policy: str | None = None,
        priority: int | None = None,
        report: Generation | None = None,
    ) -> None:
        """Restore the KV of ``prompt`` (None: of the history) without generating, for instance
        while a tool runs. A turn that has most of it in common waits for its end, and lends it its
        own priority; any other turn ends it. Messages are rendered without the beginning of an
        answer: what comes next is not known.

        ``priority``: None for one less than the session's, so that turns of others go first.

        Raises:
            ConfigError: as :meth:`generate`.
            CapacityError: as :meth:`generate`.
            ClosedError: as :meth:`generate`.
        """
        arrival, report = self._flow.clock.now(), report_of(report)
        tokens: Sequence[int] = self._history[:]
        if prompt is not None:
            chat = self._flow.engine.chat
            tokens, _ = await read_prompt(prompt, tools, chat, answered=False)
        check_fits(tokens, 1, self._flow.engine.max_tokens)
        rank = self.priority - 1 if priority is None else whole_number("priority", priority)
        ask = Ask(tokens, arrival, policy, rank)
        self._overtake(ask)
        async with self._alone():
            if agreeing(self._kv.tokens, tokens) < len(tokens):
                _, turn = self._begin(ask, report)
                prefetch = self._prefetch = Prefetch(turn, tokens)
                try:
                    await prefetch.run()
                finally:
                    self._prefetch, self._joined = None, prefetch.joined
                    self._after(turn)

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """Nobody else is at the session inside."""
        return Lasting(self._enter, self._leave)

    async def _enter(self) -> None:
        self._asking += 1
        try:
            await self._busy.acquire()
        except BaseException:
            self._left()
            raise

    async def _leave(self) -> None:
        self._busy.release()
        self._left()

    def _left(self) -> None:
        self._asking -= 1
        self._flow.room.changed()

    def _overtake(self, ask: Ask) -> None:
        """A turn or prefetch is about to wait for the session."""
        self._check_open()
        if self._prefetch is not None:
            self._prefetch.overtaken(ask.tokens, ask.priority)

    def _begin(self, ask: Ask, report: Generation) -> tuple[Turn | None, Turn]:
        """A new turn, and the one before it if that was a prefetch it has joined."""
        self._check_open()  # it was waited for
        known = agreeing(self._history, ask.tokens)
        before, self._joined = self._joined, None
        return before, Turn(self._flow, self._kv, self._tenant, ask, report, known)

    def _after(self, turn: Turn) -> None:
        """A turn is over, well or not."""
        if turn.restored:
            self.keys = self._kv.keys or self.keys
        self._touch()

    def _touch(self) -> None:
        self.used_at = self._flow.clock.now()
        if not self._closed:
            self._flow.touched(cast("Session", self))

    def _check_open(self) -> None:
        self._flow.check_open()
        if self._closed:
            raise ClosedError(f"{self._kv.name} is closed: ask CacheFlow for a new one")

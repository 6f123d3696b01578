"""One turn of the model for one request: from a prompt to pieces of an answer, and what it took.

Endpoints say what is asked (a :class:`Job`) and put the pieces into their own form. Knows sessions
and words; knows nothing of HTTP.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from cacheflow.plugins.openai_server.prefix import reason_for
from cacheflow.plugins.openai_server.text import Detokenizer, StopFinder
from cacheflow.plugins.openai_server.tool_calls import Call, CallFinder
from cacheflow.session import Generation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from typing import Any

    from cacheflow.plugins.openai_server.conversations import Lent, Scope
    from cacheflow.plugins.openai_server.messages import Rendered
    from cacheflow.plugins.openai_server.prefix import Fingerprint, History, Reason
    from cacheflow.plugins.openai_server.template import Words
    from cacheflow.plugins.openai_server.tool_calls import Piece
    from cacheflow.types import Sampling

__all__ = ["Answer", "Divergence", "Job"]


_ANSWERED: Final = ("assistant", "tool")
"""Roles of messages that only a conversation under way has."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked of the model."""

    scope: Scope
    prompt: list[int]
    max_new_tokens: int
    made_of: Fingerprint
    stops: tuple[str, ...] = ()
    functions: frozenset[str] | None = None
    """Names of the functions that may be called; None: all that the model says is text."""
    forced: str = ""
    """Words at the end of the prompt that belong to the answer."""
    one_call: bool = False
    sampling: Sampling | None = None
    keep_seconds: float | None = None
    """How long the conversation's KV is worth keeping, if the client said so."""
    messages: list[Rendered] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the prompt left what the conversation held."""

    token: int
    held_tokens: int
    message: int | None
    reason: Reason


class Answer:
    """An answer as it is made. Read :meth:`pieces` to its end, or close it, then look.

    ``waited``: seconds since its request came.
    """

    def __init__(self, job: Job, lent: Lent, words: Words, waited: Callable[[], float]) -> None:
        self.report = Generation()
        self.divergence: Divergence | None = None
        self.tokens: list[int] = []
        self.ttft_seconds: float | None = None
        self.finish_reason: Literal["stop", "length", "tool_calls"] = "length"
        self._called = 0
        self._job = job
        self._lent = lent
        self._words = words
        self._waited = waited
        self._enough = False
        """Nothing of what the model may still say is wanted."""
        self._text = Detokenizer(words.decode)
        self._stops = StopFinder(job.stops)
        self._calls = CallFinder(job.functions) if job.functions is not None else None

    @property
    def session(self) -> str:
        """Name of the conversation."""
        return self._lent.session.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._job.prompt)

    async def compare(self, chunk_tokens: int) -> None:
        """Find out whether, where and why the prompt left the conversation's history."""
        history, common = self._lent.compared, self._lent.common
        prompt = self._job.prompt
        if history is None or common >= min(history.held_tokens, len(prompt)):
            return
        if self._begins_anew(history, common, chunk_tokens):
            return
        reason, message = reason_for(history, prompt, common, self._job.made_of, self._words.decode)
        if message is None and self._job.messages:
            message = await self._words.message_at(common, self._job.messages, self._job.tools)
        self.divergence = Divergence(common, history.held_tokens, message, reason)

    def _begins_anew(self, history: History, common: int, chunk_tokens: int) -> bool:
        """Whether it is another conversation's first turn, which shares a template, or a system
        prompt that all begin with, and rewrites nothing."""
        messages = self._job.messages
        if not messages or any(message["role"] in _ANSWERED for message in messages):
            return False
        if history.made_of.messages[:1] == self._job.made_of.messages[:1]:
            return self._job.scope.key is None
        return common < chunk_tokens

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Text and calls, in order, as soon as they are certain."""
        for piece in self._certain(self._job.forced):
            yield piece
        async with aclosing(self._generate()) as made:
            async for token in made:
                self.tokens.append(token)
                if self.ttft_seconds is None:
                    self.ttft_seconds = self._waited()
                for piece in self._add(token):
                    yield piece
                if self._enough:  # closed, the session keeps and stores what it has
                    break
        for piece in self._end():
            yield piece
        self._lent.conversation.remember(self._job.prompt, self.tokens, self._job.made_of)
        await self._advise()

    async def _advise(self) -> None:
        """An agent that called a tool is back soon; what is to be kept for long says so."""
        waiting, keep = self.finish_reason == "tool_calls", self._job.keep_seconds
        if waiting or keep:
            await self._lent.session.hint("waiting" if waiting else "idle", ttl=keep)

    def _add(self, token: int) -> list[Piece]:
        if token in self._words.stop_tokens:
            self.finish_reason = "stop"
            return []
        return self._certain(self._stops.add(self._text.add(token)))

    def _certain(self, text: str) -> list[Piece]:
        if self._stops.found:
            self.finish_reason, self._enough = "stop", True
        if self._calls is None:
            return [text] if text else []
        return self._allowed(self._calls.add(text)) if text else []

    def _end(self) -> list[Piece]:
        pieces = self._certain(self._stops.add(self._text.end()) + self._stops.end())
        if self._calls is not None:
            pieces += self._allowed(self._calls.end())
        if self._called:
            self.finish_reason = "tool_calls"
        return pieces

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Without what follows the one call, where only one may be made."""
        allowed: list[Piece] = []
        for piece in pieces:
            if self._called and self._job.one_call:
                break
            allowed.append(piece)
            self._called += isinstance(piece, Call)
        self._enough |= bool(self._called and self._job.one_call)
        return allowed

    def _generate(self) -> AsyncGenerator[int, None]:
        return self._lent.session.generate(
            self._job.prompt,
            max_new_tokens=self._job.max_new_tokens,
            stop_tokens=self._words.stop_tokens,
            sampling=self._job.sampling,
            report=self.report,
        )

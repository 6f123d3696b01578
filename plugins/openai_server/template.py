"""The served model's words: prompts rendered and tokenized off the event loop, tokens decoded.

Knows a chat template (``cacheflow.abc.ChatTemplate``, an engine's) and one thread, which all
renderings take turns on: a long conversation takes tens of milliseconds to tokenize.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from cacheflow.errors import ConfigError
from cacheflow.plugins.openai_server.messages import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import ChatTemplate
    from cacheflow.plugins.openai_server.messages import Rendered

__all__ = ["Words"]

T = TypeVar("T")

_PROBE = [{"type": "function", "function": {"name": "probe", "description": "p", "parameters": {}}}]


class Words:
    """Use :meth:`aclose` at the end: it owns a thread."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cacheflow-render")
        self.stop_tokens = chat.stop_tokens
        self._knows_tools = _knows_tools(chat)

    async def render(
        self, messages: list[Rendered], tools: list[dict[str, Any]] | None, forced: str = ""
    ) -> list[int]:
        """Tokens of the conversation and of the beginning of an answer; ``forced``: words that the
        answer begins with."""

        def work() -> list[int]:
            tokens = self._render(messages, tools, answer=True)
            return tokens + self._chat.encode(forced) if forced else tokens

        return await self.off_loop(work)

    async def render_so_far(
        self, messages: list[Rendered], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Tokens of the conversation alone, which any next message comes behind."""
        return await self.off_loop(lambda: self._render(messages, tools, answer=False))

    async def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` as it is."""
        return await self.off_loop(lambda: self._chat.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a few tokens, without those that only delimit."""
        return self._chat.decode(tokens)

    async def message_at(
        self, token: int, messages: list[Rendered], tools: list[dict[str, Any]] | None
    ) -> int | None:
        """Index of the message that the prompt's token ``token`` is in; None where the template
        cannot render a part of the conversation."""
        return await self.off_loop(lambda: self._message_at(token, messages, tools))

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread; given up, it still ends there."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work)

    def aclose(self) -> None:
        """Let the thread end once its work has."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _render(
        self, messages: list[Rendered], tools: list[dict[str, Any]] | None, *, answer: bool
    ) -> list[int]:
        if not self._knows_tools:
            messages, tools = in_words(messages, tools), None
        return self._chat.render(messages, tools, answer)

    def _message_at(
        self, token: int, messages: list[Rendered], tools: list[dict[str, Any]] | None
    ) -> int | None:
        low, high = 0, len(messages) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                end = len(self._render(messages[: middle + 1], tools, answer=False))
            except ConfigError:  # a template may refuse half a conversation
                return None
            low, high = (low, middle) if token < end else (middle + 1, high)
        return low


def _knows_tools(chat: ChatTemplate) -> bool:
    """Whether the template says anything else when there is a tool."""
    talk = [{"role": "user", "content": "p"}]
    try:
        return chat.render(talk, _PROBE) != chat.render(talk)
    except ConfigError:  # it fails over a tool it does not know, or over so little talk
        return False

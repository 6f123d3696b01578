"""Clients of a server over HTTP that come and go, and what each of them was told.

Knows OpenAI's streaming API and nothing of the server behind it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import httpx2

__all__ = ["ANSWER", "MODEL", "Client", "Record", "Said"]

MODEL: Final = "tiny-chat"
ANSWER: Final = 12
"""Tokens of an answer."""
LONGEST: Final = 1400
"""Tokens of a prompt, after which a new conversation begins."""
_SYSTEM: Final = ("the cat sat on the mat " * 30, "the dog and the cat " * 40, "on the mat " * 60)
_WORDS: Final = ("cat", "dog", "mat", "sat", "and", "the", "on", "a", "bird", "zebra")


@dataclass(frozen=True, slots=True)
class Said:
    """What was asked and what came back: all of it, or what came before the client went away."""

    messages: tuple[dict[str, str], ...]
    text: str
    whole: bool


@dataclass(slots=True)
class Record:
    """What happened to all clients."""

    turns: Counter[str] = field(default_factory=Counter)
    ttft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By client: seconds from asking to the first piece of an answer."""
    said: list[Said] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Client:
    """One conversation after the other, a turn at a time, a third of them left half way."""

    def __init__(self, number: int, seed: int, http: httpx2.AsyncClient, record: Record) -> None:
        self._number = number
        self._chance = random.Random(seed * 1000 + number)
        self._http = http
        self._record = record
        self._messages: list[dict[str, str]] = []
        self._conversations = 0
        self._prompt_tokens = 0

    async def run(self, end: float) -> None:
        """Until the time is over; a turn under way ends."""
        while time.monotonic() < end:
            if not self._messages or self._prompt_tokens > LONGEST or self._chance.random() < 0.05:
                self._conversations += 1
                system = self._chance.choice(_SYSTEM)
                self._messages, self._prompt_tokens = [{"role": "system", "content": system}], 0
            words = " ".join(self._chance.choices(_WORDS, k=self._chance.randrange(1, 60)))
            self._messages.append({"role": "user", "content": f"{self._number} {words}"})
            await self._turn()
            await asyncio.sleep(self._chance.expovariate(10.0))

    async def _turn(self) -> None:
        how = self._chance.choices(("whole", "left", "cancelled"), (0.7, 0.15, 0.15))[0]
        most = self._chance.randrange(1, ANSWER // 2) if how == "left" else None
        patience = self._chance.expovariate(1.0) if how == "cancelled" else None
        asked, pieces, ended = tuple(self._messages), list[str](), False
        try:
            async with asyncio.timeout(patience), aclosing(self._pieces()) as answer:
                async for piece in answer:
                    pieces.append(piece)
                    if len(pieces) == most:
                        break
                else:
                    ended = True
        except TimeoutError:  # of this client's patience: it goes away
            pass
        except _Refused as refused:
            self._record.turns[str(refused)] += 1
            self._messages.pop()
            return
        text = "".join(pieces)
        self._record.turns["whole" if ended else "left" if most else "cancelled"] += 1
        self._record.said.append(Said(asked, text, ended))
        self._messages.append({"role": "assistant", "content": text})

    async def _pieces(self) -> AsyncGenerator[str]:
        """The text of an answer as it comes; leaving it closes the connection."""
        body = {
            "model": MODEL,
            "messages": self._messages,
            "max_completion_tokens": ANSWER,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt_cache_key": f"{self._number}/{self._conversations}",
        }
        asked = time.monotonic()
        first = True
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code in (429, 503):
                raise _Refused(response.status_code)
            response.raise_for_status()
            async for line in response.aiter_lines():
                event = line.removeprefix("data: ")
                if not event or event == "[DONE]":
                    continue
                chunk = json.loads(event)
                if first:
                    self._record.ttft[self._number].append(time.monotonic() - asked)
                    first = False
                if usage := chunk.get("usage"):
                    self._count(usage)
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    def _count(self, usage: dict[str, Any]) -> None:
        self._prompt_tokens = usage["prompt_tokens"]
        self._record.prompt_tokens += usage["prompt_tokens"]
        self._record.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


class _Refused(Exception):
    """The server is too busy: 429 or 503."""

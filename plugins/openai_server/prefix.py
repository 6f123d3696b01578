"""Where a conversation's new prompt leaves the tokens it had, and what the client can do about it.

Pure. Knows two sequences of tokens and digests of the messages that they were made of.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Fingerprint", "Reason", "History", "common_tokens", "packed", "reason_for"]

_WIDTH = array("I").itemsize


class Reason(StrEnum):
    """What changed. ``docs/server.md`` says what to do about each."""

    TOOLS = "tools_changed"
    MESSAGE = "message_changed"
    ANSWER = "answer_changed"
    """The last answer came back as another text, or the template shows it in another form."""
    RETOKENIZED = "answer_retokenized"
    """The same text, cut into other tokens than the model had made of it."""
    TEMPLATE = "template_rewrote_history"
    """All messages are the same, the rendered tokens are not."""
    PROMPT = "prompt_changed"
    """A prompt that is not made of messages."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of what a prompt was rendered from."""

    tools: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[object], tools: object) -> Fingerprint:
        """Of rendered messages; empty for a prompt that is not made of messages."""
        return cls(_digest(tools), tuple(map(_digest, messages)))


@dataclass(frozen=True, slots=True)
class History:
    """What a conversation had after its last turn."""

    tokens: bytes
    """:func:`packed`: the prompt and what was generated."""
    prompt_tokens: int
    made_of: Fingerprint

    @property
    def held_tokens(self) -> int:
        """Tokens in all."""
        return len(self.tokens) // _WIDTH


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, which compare at memory speed."""
    return array("I", tokens).tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two packed sequences share."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    while low < high:  # everything below `low` is equal; copies of bytes, compared by memcmp
        middle = (low + high + 1) // 2
        part = slice(low * _WIDTH, middle * _WIDTH)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low


def reason_for(
    history: History,
    prompt: Sequence[int],
    common: int,
    made_of: Fingerprint,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Reason, int | None]:
    """Why token ``common`` is another one now, and the index of the message to blame where it is
    certain without rendering."""
    old, new = history.made_of, made_of
    if not new.messages or not old.messages:
        return Reason.PROMPT, None
    if old.tools != new.tools:
        return Reason.TOOLS, None
    pairs = enumerate(zip(old.messages, new.messages, strict=False))
    changed = next((i for i, (before, now) in pairs if before != now), None)
    if changed is not None:
        return Reason.MESSAGE, changed
    if common < history.prompt_tokens:
        return Reason.TEMPLATE, None
    answered = array("I", history.tokens)[common:].tolist()
    text = decode(answered)
    again = decode(prompt[common : common + 2 * len(answered) + 8])
    if text and again.startswith(text):
        return Reason.RETOKENIZED, len(old.messages)
    return Reason.ANSWER, len(old.messages)


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""What may be asked for: prompts of tokens or of messages, and limits, checked before any work.

Knows no engine but its context length and its chat template.
"""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from cacheflow.abc import Sampler
from cacheflow.errors import ConfigError
from cacheflow.types import Sampling

if TYPE_CHECKING:
    from cacheflow.abc import ChatTemplate, Engine
    from cacheflow.types import ChunkKey

__all__ = [
    "Messages",
    "Prompt",
    "agreeing",
    "agreeing_keys",
    "check_fits",
    "check_sampling",
    "folder",
    "read_prompt",
    "seconds",
    "stop_set",
    "whole_number",
]

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""As chat APIs have them: each with a ``role``, most with ``content``."""
Prompt: TypeAlias = "Sequence[int] | Messages"
"""The whole history: token ids (a list, an array, a tensor ...), or messages."""


async def read_prompt(
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]] | None,
    chat: ChatTemplate | None,
    *,
    answered: bool = True,
) -> tuple[Sequence[int], frozenset[int]]:
    """The tokens of ``prompt`` as they are now, and the stop tokens that come with messages.
    ``answered``: messages end with the beginning of an answer.

    Raises:
        ConfigError: it is no prompt, is empty, or is of messages one of which is none, or for which
            the model has no template.
    """
    if not _length(prompt):
        raise ConfigError("the prompt is empty: give at least one token")
    if not isinstance(_first(prompt), Mapping):
        if tools:
            raise ConfigError("tools go with messages: a prompt of tokens has its tools in it")
        return _as_it_is_now(cast("Sequence[int]", prompt)), frozenset()
    messages = [_message(i, each) for i, each in enumerate(cast("Messages", prompt))]
    if chat is None:
        raise ConfigError("the model has no chat template: give token ids instead of messages")
    tokens = await asyncio.to_thread(chat.render, messages, tools, answered)
    if not tokens:
        raise ConfigError("the prompt is empty: the chat template makes nothing of these messages")
    return tokens, chat.stop_tokens


def check_fits(prompt: Sequence[int], new: int, longest: int) -> None:
    """Raise ConfigError unless ``prompt`` and ``new`` tokens fit a context of ``longest``."""
    room = longest - len(prompt) + 1
    if new > room:
        todo = f"set max_new_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise ConfigError(
            f"prompt of {len(prompt)} tokens and max_new_tokens {new} do not fit "
            f"the model's context of {longest} tokens: {todo}"
        )


def check_sampling(sampling: Sampling | None, engine: Engine) -> None:
    """Raise ConfigError if tokens are to be drawn by an engine that cannot, or nobody knows how."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling must be a Sampling, got {sampling!r}")
    if sampling is not None and not isinstance(engine, Sampler):
        raise ConfigError("this engine always takes the likeliest token: leave out the sampling")


def whole_number(name: str, value: object, least: int = -(1 << 31)) -> int:
    """``value`` as an int of at least ``least``; ConfigError names it otherwise."""
    try:
        number = operator.index(cast("Any", value))
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")
    return number


def seconds(name: str, value: float | None) -> float | None:
    """``value`` if it is a number of seconds, or None; ConfigError names it otherwise."""
    if value is None:
        return None
    if not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
    return value


def folder(name: str, value: Path | str) -> Path:
    """``value`` as a path; ConfigError names it if it is none."""
    try:
        return Path(value)
    except TypeError:
        raise ConfigError(f"{name} must be a folder's path, got {value!r}") from None


def stop_set(tokens: Collection[int]) -> frozenset[int]:
    """Stop tokens as a set; ConfigError if they are no tokens."""
    try:
        stops = frozenset(map(operator.index, tokens))
    except TypeError:
        stops = frozenset((-1,))
    if stops and min(stops) < 0:
        raise ConfigError(f"stop_tokens must be token ids, got {tokens!r}")
    return stops


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two prompts have in common: by halves, so that C compares them."""
    low, high = 0, min(len(one), len(other))
    if list(one[:high]) == list(other[:high]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def agreeing_keys(one: Sequence[ChunkKey], other: Sequence[ChunkKey]) -> int:
    """How many leading keys two prompts have in common: keys are chained, so one look at a place
    says whether all before it are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _length(prompt: Prompt) -> int:
    try:
        if not isinstance(prompt, str | bytes):
            return len(prompt)
    except TypeError:
        pass
    raise _no_prompt(prompt)


def _first(prompt: Prompt) -> object:
    """What it begins with. A set, or a mapping (one message alone, say), has no order."""
    if isinstance(prompt, Mapping):
        raise ConfigError("the prompt is one message: give a list of messages")
    try:
        return prompt[0]
    except (TypeError, LookupError):
        raise _no_prompt(prompt) from None


def _message(index: int, message: object) -> dict[str, Any]:
    """A copy. What else a message needs is the template's to say."""
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ConfigError(f"message {index} of the prompt is {kind}: give role and content")
    if not isinstance(message.get("role"), str):
        raise ConfigError(
            f"message {index} of the prompt has no role: give 'system', 'user', 'assistant' or "
            "'tool'"
        )
    copied = dict(message)
    if "content" in copied:
        copied["content"] = _text(index, copied["content"])
    return copied


def _text(index: int, content: object) -> object:
    """``content``, of a list of text parts their text: few templates know lists."""
    if not isinstance(content, list | tuple):
        return content
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"message {index} of the prompt has a part of type {kind!r}: give text, or parts "
                'such as {"type": "text", "text": "..."}'
            )
    return "\n".join(part["text"] for part in content)


def _no_prompt(prompt: object) -> ConfigError:
    return ConfigError(f"the prompt is {type(prompt).__name__}: give token ids, or messages")


def _as_it_is_now(prompt: Sequence[int]) -> Sequence[int]:
    """A copy. Of an array or tensor the numbers: its slices are views, and ``+`` adds them up."""
    numbers = None if isinstance(prompt, memoryview) else getattr(prompt, "tolist", None)
    copied: Sequence[int] = prompt[:] if numbers is None else numbers()
    return copied

"""Prompts of messages, as they come from programs that speak to chat APIs."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.session.prompts import read_prompt


class Letters:
    """A template that needs ``content`` to be text; tokens are code points."""

    stop_tokens = frozenset({0})

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True) -> Any:
        return [ord(letter) for message in messages for letter in message["content"]]


LETTERS: Any = Letters()


async def test_parts_of_text_are_their_text() -> None:
    """Content as a list of text parts is the same prompt as their lines; the caller's message stays
    as it is."""
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    message = {"role": "user", "content": parts}
    tokens, stops = await read_prompt([message], None, LETTERS)
    assert "".join(map(chr, tokens)) == "ab\nc"
    assert stops == {0}
    assert message["content"] is parts


@pytest.mark.parametrize(
    ("part", "named"),
    [({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"), ("text", "'str'")],
)
async def test_a_part_that_is_no_text_is_named(part: Any, named: str) -> None:
    """... before the template fails over it in words of its own."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [part]},
    ]
    with pytest.raises(ConfigError, match=f"message 1 of the prompt has a part of type {named}"):
        await read_prompt(messages, None, LETTERS)

"""Where a prompt leaves a history, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.plugins.openai_server.prefix import (
    Fingerprint,
    History,
    Reason,
    common_tokens,
    packed,
    reason_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_tokens(one: list[int], other: list[int]) -> None:
    """As many as comparing one by one finds."""
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_tokens(packed(one), packed(other)) == expected


def text_of(tokens: Sequence[int]) -> str:
    """Tokens below 128 are a character, others two."""
    return "".join(chr(t) if t < 128 else chr(t - 128) * 2 for t in tokens)


@pytest.mark.parametrize(
    ("messages", "tools", "prompt", "reason", "message"),
    [
        ([SYSTEM, HELLO, ANSWER, HELLO], None, [9, 2, 3, 4, 5], Reason.TOOLS, None),
        ([HELLO, HELLO], TOOLS, [9, 2, 3, 4, 5], Reason.MESSAGE, 0),
        ([SYSTEM, ANSWER], TOOLS, [1, 2, 9, 4, 5], Reason.MESSAGE, 1),
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS, [1, 2, 9, 4, 5], Reason.TEMPLATE, None),
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS, [1, 2, 3, 4, 97 + 128], Reason.RETOKENIZED, 2),
        ([SYSTEM, HELLO, ANSWER, HELLO], TOOLS, [1, 2, 3, 4, 98, 98], Reason.ANSWER, 2),
        ([], None, [9, 2, 3, 4, 5], Reason.PROMPT, None),
    ],
)
def test_the_reason_is_named(
    messages: list[Any], tools: Any, prompt: list[int], reason: Reason, message: int | None
) -> None:
    """Tools, a message, the template, the answer's form or its tokens: each is told from the
    others, with the message where it is certain."""
    history = History(packed([1, 2, 3, 4, 97, 97]), 4, Fingerprint.of([SYSTEM, HELLO], TOOLS))
    common = common_tokens(history.tokens, packed(prompt))
    made_of = Fingerprint.of(messages, tools)
    assert reason_for(history, prompt, common, made_of, text_of) == (reason, message)

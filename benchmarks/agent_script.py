"""What an agent's context grows by from outside: its task, and a tool's result a turn.

The same tokens in every process, so that a conversation can go on in another one. Knows a
tokenizer with a chat template, or makes tokens up where there is none; knows nothing of KV caches.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from cacheflow.cli.bench_rig import real_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LONGEST_RESULT", "Script"]

LONGEST_RESULT: Final = 62
"""Tokens of a tool's result, template included. With the one token of the answer that is not in
the KV cache, at most 64 tokens are behind what can be restored."""

_TASK: Final = (
    "You are an agent that documents a code base. Write about what you have read so far, at "
    "length; after each part a tool shows you the next lines. The code begins so:\n\n"
)
_MARK: Final = "\N{SYMBOL FOR SUBSTITUTE}answer\N{SYMBOL FOR SUBSTITUTE}"
_MADE_UP: Final = 256
"""Tokens that every vocabulary has."""
_RESULT: Final = 40
"""Tokens of source code in a tool's result."""


class Script:
    """``tokenizer`` None: tokens are made up."""

    def __init__(self, tokenizer: Any, opening: int, turns: int) -> None:
        self._tokenizer = tokenizer
        self._opening = opening
        self._source: Sequence[int] = ()
        if tokenizer is not None:
            # Results of later turns than there are: for branches.
            self._source = real_tokens(tokenizer, opening + _RESULT * (turns + 8))

    def opening(self) -> list[int]:
        """The first prompt: the task with a long document, about ``opening`` tokens."""
        if self._tokenizer is None:
            return self._made_up(0, self._opening)
        document = self._tokenizer.decode(self._source[: self._opening - 64])
        task = {"role": "user", "content": _TASK + document}
        rendered: str = self._tokenizer.apply_chat_template(
            [task], tokenize=False, add_generation_prompt=True
        )
        return self._encode(rendered)

    def result(self, turn: int) -> list[int]:
        """What stands between the answer before ``turn`` (from 1) and the answer of it."""
        if self._tokenizer is None:
            return self._made_up(turn, _RESULT)
        start, size = self._opening + _RESULT * (turn - 1), _RESULT
        while True:
            excerpt = self._tokenizer.decode(self._source[start : start + size])
            tokens = self._behind_answer(excerpt)
            if len(tokens) <= LONGEST_RESULT:
                return tokens
            size -= len(tokens) - LONGEST_RESULT  # cut text is not always tokenised as it was

    def _behind_answer(self, result: str) -> list[int]:
        """The template's end of an answer, and the tool's result as a message."""
        answer = {"role": "assistant", "content": _MARK}
        rendered: str = self._tokenizer.apply_chat_template(
            [answer, {"role": "tool", "content": result}],
            tokenize=False,
            add_generation_prompt=True,
        )
        return self._encode(rendered.rpartition(_MARK)[2])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _made_up(self, seed: int, count: int) -> list[int]:
        chance = random.Random(seed)
        return [chance.randrange(_MADE_UP) for _ in range(count)]

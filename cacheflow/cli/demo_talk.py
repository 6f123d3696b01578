"""The demo's conversation: an agent that reads source files of the standard library, turn by turn.

Knows a tokenizer with a chat template; knows nothing of KV caches. What is read comes with Python,
so that the conversation exists wherever the demo runs.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FINAL_QUESTION", "Talk", "Turn", "turns"]

FINAL_QUESTION: Final = "Thanks. In two sentences: what does the heapq module do?"

_SYSTEM: Final = "You are a careful assistant that reads source code and answers briefly."
_READS: Final = ("shlex", "textwrap", "heapq")
"""One module a turn; where one is too short for its share, the next ones follow."""
_SHARES: Final = (0.5, 0.75, 1.0)
"""Share of the history that is there after each turn."""
_OVER: Final = 8
"""The last token of a prompt is never restored: a few more make the chunks before it whole."""
_MARK: Final = "\N{SYMBOL FOR SUBSTITUTE}answer\N{SYMBOL FOR SUBSTITUTE}"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user asks, and the file that the agent's tool returns for it."""

    question: str
    source: str
    until: int
    """Tokens of the prompt with this turn in it."""


def turns(tokens: int) -> tuple[Turn, ...]:
    """The turns of a history with ``tokens`` tokens to restore."""
    sources = [inspect.getsource(importlib.import_module(name)) for name in _READS]
    return tuple(
        Turn(
            f"Read the source of the {name} module and tell me in one sentence what it is for.",
            "\n".join(sources[i:] + sources[:i]),
            int(tokens * share) + _OVER,
        )
        for i, (name, share) in enumerate(zip(_READS, _SHARES, strict=True))
    )


class Talk:
    """A conversation as exact token ids: what was generated is kept as it was generated."""

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("the model's folder has no tokenizer with a chat template")
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = [{"role": "system", "content": _SYSTEM}]
        self.tokens: list[int] = []
        """The prompt so far, answers included."""
        self.stop: frozenset[int] = frozenset({tokenizer.eos_token_id} - {None})

    def text(self, tokens: Sequence[int]) -> str:
        """``tokens`` as people read them."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def ask(self, question: str) -> list[int]:
        """The prompt with the user's next message at its end."""
        return self._say([{"role": "user", "content": question}])

    def read(self, turn: Turn) -> list[int]:
        """The prompt with the question and as much of the file as makes it ``until`` long."""
        source = self._encode(turn.source)
        fits, best = turn.until - len(self.tokens), 0
        while True:
            excerpt = self._tokenizer.decode(source[:fits])
            new = [
                {"role": "user", "content": turn.question},
                {"role": "tool", "content": excerpt},
            ]
            # Cutting text changes how its end is tokenised: a few rounds find the length.
            length = len(self._prompt(new))
            if 0 <= length - turn.until < 4 or fits in (best, len(source)):
                return self._say(new)
            best = fits
            fits = min(max(fits + turn.until - length, 1), len(source))

    def answered(self, tokens: Sequence[int]) -> None:
        """The model's answer to the last prompt; a stop token at its end is the template's."""
        self.tokens += [t for t in tokens if t not in self.stop]
        self._messages.append({"role": "assistant", "content": _MARK})

    def _say(self, new: list[dict[str, str]]) -> list[int]:
        self.tokens = self._prompt(new)
        self._messages += new
        return list(self.tokens)

    def _prompt(self, new: list[dict[str, str]]) -> list[int]:
        """Old tokens as they are, then what the template puts behind the last answer."""
        rendered: str = self._tokenizer.apply_chat_template(
            [*self._messages, *new], tokenize=False, add_generation_prompt=True
        )
        return self.tokens + self._encode(rendered.rpartition(_MARK)[2])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

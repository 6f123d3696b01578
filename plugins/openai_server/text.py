"""From tokens to the text that a client may see: whole characters, and nothing of a stop sequence.

Pure; knows a ``decode`` function and nothing of tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopFinder"]

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_LONGEST: Final = 4
"""A character has at most four bytes, so no more tokens than that can be waiting for its end."""


class Detokenizer:
    """Text of a growing sequence of tokens, a few tokens decoded for each new one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0
        """Decoding begins here: what a token looks like may depend on the one before."""
        self._told = 0
        """The text of the tokens before this one was told."""

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._tokens.append(token)
        waiting = len(self._tokens) - self._told
        return self._next(may_wait=waiting <= _LONGEST)

    def end(self) -> str:
        """What was held back; an incomplete character as U+FFFD."""
        return self._next(may_wait=False)

    def _next(self, *, may_wait: bool) -> str:
        before = self._decode(self._tokens[self._start : self._told])
        now = self._decode(self._tokens[self._start :])
        if may_wait and now.endswith(_REPLACEMENT):
            return ""
        self._start, self._told = self._told, len(self._tokens)
        return now[len(before) :]


class StopFinder:
    """Passes text on up to the first stop sequence; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is certainly before any stop sequence; nothing after one was found."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        first = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if first >= 0:
            self.found, self._held = True, ""
            return text[:first]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back: no stop sequence came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

"""From tokens to the text that a client may see: whole characters, and nothing of a stop sequence.

Pure; knows a ``decode`` function and nothing of tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopFinder"]

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_INCOMPLETE: Final = 3
"""A character has at most four bytes, so of no more of them may the end be to come."""
_LONGEST: Final = 64
"""Tokens that are decoded again for the next one at most, in a run that is no text."""


class Detokenizer:
    """Text of a growing sequence of tokens, a few tokens decoded for each new one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = 0
        """Decoding begins here: what a token looks like may depend on the one before."""
        self._whole = 0
        """The text of the tokens before this one was told, to its end."""
        self._told = ""
        """What was told of the text that begins with token ``_start``."""

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._tokens.append(token)
        now = self._decode(self._tokens[self._start :])
        if not now.endswith(_REPLACEMENT) or len(self._tokens) - self._whole > _LONGEST:
            return self._tell_all(now)
        # Bytes that are no text may be followed by the first ones of a character.
        unsure = min(len(now) - len(now.rstrip(_REPLACEMENT)), _INCOMPLETE)
        certain = now[:-unsure]
        if not certain.startswith(self._told):  # byte by byte, a run looks whole or not at all
            return ""
        new, self._told = certain[len(self._told) :], certain
        return new

    def end(self) -> str:
        """What was held back; an incomplete character as U+FFFD."""
        return self._tell_all(self._decode(self._tokens[self._start :]))

    def _tell_all(self, now: str) -> str:
        new = now[len(self._told) :]
        self._start, self._whole = self._whole, len(self._tokens)
        self._told = self._decode(self._tokens[self._start :])
        return new


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

"""Tool calls in a model's text: found as the text comes, told apart from what is only text.

Three ways to write a call are read: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
(Hermes, Qwen, SmolLM2), the same with a list of calls inside, and an answer that is nothing but one
such object (Llama 3, ``parameters`` in place of ``arguments``). What cannot be read stays text:
nothing that the model said is lost. Pure.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["CLOSING", "OPENING", "Call", "CallFinder", "Piece"]

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; ``arguments`` is a JSON document."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Piece: TypeAlias = str | Call
"""A part of an answer: text, or a call."""


class CallFinder:
    """``names``: the functions that there are; a bare object naming another one is text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._inside = False
        """Behind an opening tag."""
        self._bare = True
        """All so far may be one bare object."""
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """What is certain now, in order."""
        self._held += text
        if self._bare and self._may_be_bare():
            return []
        self._bare = False
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """The rest: a call whose closing tag never came counts if it is complete."""
        held, self._held = self._held, ""
        if not held or (self.calls and not held.strip()):
            return []
        found = _parse(held.removeprefix(OPENING)) if self._inside or self._bare else []
        if self._bare and any(call.name not in self._names for call in found):
            found = []
        self.calls += len(found)
        return list(found) or [held]

    def _may_be_bare(self) -> bool:
        start = self._held.lstrip()
        return not start or start[0] in "{["

    def _step(self, pieces: list[Piece]) -> bool:
        """Take one piece off what is held; False when nothing more is certain."""
        if self._inside:
            return self._close(pieces)
        before, tag, _ = self._held.partition(OPENING)
        if tag:
            self._inside = True
            self._held = self._held[len(before) :]
            if text := before.rstrip():  # templates put white space in front of calls themselves
                pieces.append(text)
            return True
        keep = _possible_tag(self._held)
        if certain := self._held[: len(self._held) - keep]:
            pieces.append(certain)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _close(self, pieces: list[Piece]) -> bool:
        inner, tag, rest = self._held.removeprefix(OPENING).partition(CLOSING)
        if not tag:
            return False
        found = _parse(inner)
        self.calls += len(found)
        pieces += found or [OPENING + inner + CLOSING]
        self._inside, self._held = False, rest
        return True


def _possible_tag(text: str) -> int:
    """Characters at the end that may be the start of a call: part of a tag, or white space."""
    start = text.rfind("<")
    tag = len(text) - start if start >= 0 and OPENING.startswith(text[start:]) else 0
    bare = text[: len(text) - tag]
    return tag + len(bare) - len(bare.rstrip())


def _parse(text: str) -> list[Call]:
    """The calls in a JSON document; none if it is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(entry) for entry in (document if isinstance(document, list) else [document])]
    return [call for call in calls if call] if all(calls) else []


def _call(entry: Any) -> Call | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(entry["name"], arguments)
    return Call(entry["name"], json.dumps(arguments, ensure_ascii=False))

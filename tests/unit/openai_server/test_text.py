"""Text that is certain: whole characters, and nothing of a stop sequence, however it is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.plugins.openai_server.text import Detokenizer, StopFinder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def of_bytes(tokens: Sequence[int]) -> str:
    """A vocabulary of bytes: the hardest, since every character may be cut."""
    return bytes(tokens).decode(errors="replace")


def of_byte_tokens(tokens: Sequence[int]) -> str:
    """As vocabularies with byte fallback do it: one bad byte makes the whole run no text."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}" * len(tokens)


@pytest.mark.parametrize("decode", [of_bytes, of_byte_tokens])
@given(text=st.text())
def test_pieces_are_the_text(decode: Callable[[Sequence[int]], str], text: str) -> None:
    """A well-formed text is told once and whole, and no piece ends inside a character."""
    pieces = Detokenizer(decode)
    told = [pieces.add(token) for token in text.encode(errors="replace")]
    assert "".join([*told, pieces.end()]) == text.encode(errors="replace").decode()


@given(st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=2).map(str.encode)), max_size=10))
def test_what_is_no_text_is_told_as_such(parts: list[bytes]) -> None:
    """Characters come out whole, also right behind bytes that never become one."""
    tokens = b"".join(parts)
    pieces = Detokenizer(of_bytes)
    assert "".join([*map(pieces.add, tokens), pieces.end()]) == of_bytes(tokens)


def test_what_is_no_text_is_not_waited_for_without_end() -> None:
    """Of a thousand bad bytes three may wait; each costs the decoding of some at most."""
    asked: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        asked.append(len(tokens))
        return of_bytes(tokens)

    pieces, told = Detokenizer(decode), 0
    for number in range(1, 1001):
        told += len(pieces.add(0xFF))
        assert told >= number - 3
    assert max(asked) < 200


def test_a_token_is_told_when_it_comes() -> None:
    """Nothing is held back but incomplete characters."""
    pieces = Detokenizer(of_bytes)
    assert [pieces.add(token) for token in "aéb".encode()] == ["a", "", "é", "b"]


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_nothing_behind_a_stop_sequence_is_told(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """However the text is cut, what is told is what is before the first stop sequence."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    finder, told, done = StopFinder(stops), "", 0
    for cut in [*cuts, len(text)]:
        told += finder.add(text[done:cut])
        done = cut
    told += finder.end()
    # As it is found while the text comes: the first to be complete, and where it began.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert told == text
        assert not finder.found
    else:
        assert finder.found
        assert told in {text[: text.find(s)] for s in stops if s in text}
        assert len(told) <= min(ends)[0]


def test_a_stop_sequence_is_held_back_until_it_is_none() -> None:
    """What may be the start of a stop sequence waits, and no longer than needed."""
    finder = StopFinder(["END"])
    assert [finder.add(part) for part in ("aE", "N", "x", "EN", "D", "tail")] == [
        "a",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert finder.found

"""Calls told apart from text, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.plugins.openai_server.messages import plain_call
from cacheflow.plugins.openai_server.tool_calls import Call, CallFinder

ONE = '<tool_call>\n{"name": "look", "arguments": {"at": "the <b>sky</b>"}}\n</tool_call>'
TWO = (
    '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]</tool_call>'
)


def found(parts: list[str], names: tuple[str, ...] = ("look",)) -> list[object]:
    """Neighbouring texts joined; calls as (name, arguments)."""
    finder = CallFinder(names)
    pieces = [piece for part in parts for piece in finder.add(part)] + finder.end()
    joined: list[object] = []
    for piece in pieces:
        if isinstance(piece, Call):
            joined.append((piece.name, json.loads(piece.arguments)))
        elif joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


LOOK = ("look", {"at": "the <b>sky</b>"})
CASES: list[tuple[str, list[object]]] = [
    ("plain words", ["plain words"]),
    ("  2 < 3 and <tool", ["  2 < 3 and <tool"]),
    (ONE, [LOOK]),
    (f"I will look. {ONE}\n", ["I will look.", LOOK]),
    (f"{ONE} and then {ONE}", [LOOK, " and then", LOOK]),
    (f"{ONE}\n{ONE}", [LOOK, LOOK]),
    (TWO, [("a", {}), ("b", {"x": 1})]),
    (ONE.removesuffix("</tool_call>"), [LOOK]),
    ("<tool_call>not json</tool_call>", ["<tool_call>not json</tool_call>"]),
    ('<tool_call>{"no": "name"}</tool_call>', ['<tool_call>{"no": "name"}</tool_call>']),
    ('{"name": "look", "parameters": {"at": "the <b>sky</b>"}}', [LOOK]),
    ('{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    ('{"answer": 42}', ['{"answer": 42}']),
    ("[1] is a footnote", ["[1] is a footnote"]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
@given(data=st.data())
def test_however_it_is_cut(text: str, expected: list[object], data: st.DataObject) -> None:
    """The same calls and the same text, in order; what cannot be read stays text."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert found(parts) == expected


def test_text_is_not_held_back() -> None:
    """Words pass at once; only what may be the start of a call waits."""
    finder = CallFinder(["look"])
    assert finder.add("Some words") == ["Some words"]
    assert finder.add(" <to") == []
    assert finder.add("p> more") == [" <top> more"]


def test_calls_have_ids_of_their_own() -> None:
    """Two equal calls can be answered apart."""
    finder = CallFinder(["look"])
    one, two = finder.add(ONE + ONE)
    assert isinstance(one, Call)
    assert isinstance(two, Call)
    assert one.id != two.id
    assert one.id.startswith("call_")


@pytest.mark.parametrize("written", ["{", "[" * 100_000, "9" * 5000, '"'])
def test_arguments_that_are_no_json_stay_as_they_were(written: str) -> None:
    """Whatever is wrong with them: a model wrote them, and its client sends them back."""
    assert plain_call("c", "f", written)["function"]["arguments"] == written


def test_a_call_nested_without_end_is_text() -> None:
    """What a model says is never the server's failure."""
    said = f"<tool_call>{'[' * 100_000}</tool_call>"
    assert found([said]) == [said]

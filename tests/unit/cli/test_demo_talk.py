"""The demo's conversation: exact lengths, and answers kept token by token."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow.cli.demo_talk import FINAL_QUESTION, Talk, turns
from cacheflow.errors import ConfigError


class Bytes:
    """A tokenizer of one token a byte, whose template brackets messages."""

    chat_template = "brackets"
    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


def test_history_has_the_length_asked_for() -> None:
    """After the last turn the prompt has the tokens asked for, to a few."""
    talk = Talk(Bytes())
    for turn in turns(4096):
        prompt = talk.read(turn)
        assert abs(len(prompt) - turn.until) < 4
        talk.answered([65, 66, 0])
    assert 4096 < turns(4096)[-1].until < 4096 + 16
    assert talk.ask(FINAL_QUESTION)[-11:] == list(b"<assistant>")


def test_every_prompt_extends_the_one_before() -> None:
    """Old tokens never change, and an answer stays as it was generated, less its stop token."""
    talk = Talk(Bytes())
    first = talk.ask("one")
    talk.answered([200, 201, 0])
    second = talk.ask("two")
    assert second[: len(first) + 2] == [*first, 200, 201]
    assert bytes(second[len(first) + 2 :]) == b"</><user>two</><assistant>"


def test_a_model_without_chat_template_is_refused() -> None:
    """A folder without tokenizer, or with one that has no template, is a ConfigError."""
    with pytest.raises(ConfigError, match="chat template"):
        Talk(None)

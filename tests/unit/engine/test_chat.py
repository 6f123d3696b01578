"""Messages rendered by a tokenizer's own chat template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.chat import chat_of

WORDS = ("[unk]", "[end]", "user", "assistant", "system", "tool", "tools", "hello", "you", "time")
TEMPLATE = """\
{% if tools %}tools {{ tools[0]['name'] }} {% endif %}\
{% for message in messages %}\
{% if message['role'] == 'banned' %}{{ raise_exception('no such role') }}{% endif %}\
{{ message['role'] }} {{ message['content'] }} [end] {% endfor %}\
{% if add_generation_prompt %}assistant{% endif %}"""


def tokenizer(template: str | None = TEMPLATE) -> Any:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[unk]",
        eos_token="[end]",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def test_messages_become_tokens() -> None:
    """Roles, contents and tools by the template, with or without the beginning of an answer."""
    chat = chat_of(tokenizer())
    assert chat is not None
    messages = [{"role": "user", "content": "hello you"}]
    words = [WORDS[token] for token in chat.render(messages)]
    assert words == ["user", "hello", "you", "[end]", "assistant"]
    words = [WORDS[t] for t in chat.render(messages, [{"name": "time"}], False)]
    assert words == ["tools", "time", "user", "hello", "you", "[end]"]
    assert chat.stop_tokens == {WORDS.index("[end]")}
    assert chat.decode([7, 8, 1]) == "hello you"


@pytest.mark.parametrize(
    "messages", [[{"role": "banned", "content": "x"}], [{"role": "user", "content": 1 << 40}, {}]]
)
def test_what_the_template_refuses(messages: list[dict[str, object]]) -> None:
    """A template that raises, or stumbles over a message, is a configuration error that says so."""
    chat = chat_of(tokenizer())
    assert chat is not None
    if messages[0]["role"] == "banned":
        with pytest.raises(ConfigError, match="no such role"):
            chat.render(messages)
    else:
        assert chat.render(messages)


def test_a_model_may_end_its_turns_otherwise() -> None:
    """What its generation config calls an end is one, beside the tokenizer's."""
    end = WORDS.index("[end]")
    for ends, expected in (([7, 9], {end, 7, 9}), (7, {end, 7}), (None, {end})):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
        chat = chat_of(tokenizer(), model)
        assert chat is not None
        assert chat.stop_tokens == expected


def test_text_that_is_not_unicode() -> None:
    """Half of a surrogate pair, which JSON can write, is refused before the tokenizer sees it."""
    chat = chat_of(tokenizer())
    assert chat is not None
    with pytest.raises(ConfigError, match="not Unicode"):
        chat.render([{"role": "user", "content": "\ud800"}])


def test_a_model_without_a_template() -> None:
    """... reads no messages."""
    assert chat_of(tokenizer(None)) is None
    assert chat_of(None) is None

"""Chat templates of other kinds: with tools of their own, and those that rewrite history."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.unit.openai_server.conftest import MODEL, client_of, service_over

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.plugins.openai_server.service import Service

_END: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS: Final = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + _END
)
"""As Qwen's: tools in front, calls as objects, results under their own role."""
FORGETFUL: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'user' and loop.last %}(think hard) {% endif %}{{ message.content }}"
    "<|im_end|>\n{% endfor %}" + _END
)
"""What it shows of the last user message it does not show of an earlier one."""
STRICT: Final = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('no system messages here') }}{% endif %}{{ message.content }}{% endfor %}"
)

SYSTEM: Any = {"role": "system", "content": "the cat and the dog sat on the mat " * 6}
HELLO: Any = {"role": "user", "content": "hello"}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def templated(
    model: Path, folder: Path, template: str, *answers: str
) -> AbstractAsyncContextManager[Service]:
    """A service over the tiny model with another chat template in its folder."""
    shutil.copytree(model, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(template)
    return service_over(folder / "model", folder, answers)


async def test_a_template_with_tools_gets_them_itself(chat_model: Path, tmp_path: Path) -> None:
    """Signatures, calls and results are rendered by the template, not told in words; the turn with
    the result has the whole first one in memory."""
    says = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    async with (
        templated(chat_model, tmp_path, TOOLS, says, "blue") as service,
        client_of(service) as client,
    ):
        body: dict[str, Any] = {"model": MODEL, "messages": [SYSTEM, HELLO], "tools": [LOOK]}
        first = (await client.post("/chat/completions", json=body)).json()
        message = first["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at": "sky"}'}
        assert message["content"] is None
        result = {"role": "tool", "tool_call_id": call["id"], "content": "clear"}
        body["messages"] = [SYSTEM, HELLO, message, result]
        again = (await client.post("/chat/completions", json=body)).json()
        tokens = await service.words.render([{"role": "tool", "content": "clear"}], [LOOK])
        chat: Any = service.flow.engine.chat
        text = chat.tokenizer.decode(tokens)
    assert "Tools:" in text
    assert "<|im_start|>tool\nclear" in text
    assert again["choices"][0]["message"]["content"] == "blue"
    had = first["usage"]["total_tokens"] - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= had
    assert again["cacheflow"]["divergence"] is None


async def test_a_template_that_rewrites_history_is_found_out(
    chat_model: Path, tmp_path: Path
) -> None:
    """The messages are the same, their rendering is not: the first token that differs, the message
    it is in, and the template is to blame."""
    async with (
        templated(chat_model, tmp_path, FORGETFUL, "hi") as service,
        client_of(service) as client,
    ):
        body: dict[str, Any] = {"model": MODEL, "messages": [SYSTEM, HELLO], "max_tokens": 8}
        await client.post("/chat/completions", json=body)
        talk = [SYSTEM, HELLO, {"role": "assistant", "content": "hi"}, HELLO]
        again = (await client.post("/chat/completions", json={**body, "messages": talk})).json()
        before = await service.words.render([SYSTEM, HELLO], None)
        after = await service.words.render(talk, None)
    first = next(i for i, pair in enumerate(zip(before, after, strict=False)) if len({*pair}) == 2)
    divergence = again["cacheflow"]["divergence"]
    assert divergence["reason"] == "template_rewrote_history"
    assert (divergence["token"], divergence["message"]) == (first, 1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_template_refuses_is_a_400(
    chat_model: Path, tmp_path: Path, stream: bool
) -> None:
    """With the template's own words."""
    async with (
        templated(chat_model, tmp_path, STRICT) as service,
        client_of(service) as client,
    ):
        body = {"model": MODEL, "messages": [SYSTEM, HELLO], "stream": stream}
        answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no system messages here" in answer.json()["error"]["message"]

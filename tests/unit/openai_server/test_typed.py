"""Every answer and every event, validated by the OpenAI SDK's own models (its client only builds
them, without looking)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.unit.openai_server.conftest import MODEL, client_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

MESSAGES: list[Any] = [{"role": "user", "content": "the cat"}]
FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}
SAYS = 'I look.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
CHAT = {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}
ITEMS = {"input": MESSAGES, "tools": [{"type": "function", "strict": None, **FUNCTION}]}


def validated(model: Any, document: Any) -> Any:
    return TypeAdapter(model).validate_python(document)


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body", "answers", "whole", "part"),
    [
        ("chat/completions", CHAT, [SAYS, SAYS], ChatCompletion, ChatCompletionChunk),
        ("chat/completions", {"messages": MESSAGES}, [], ChatCompletion, ChatCompletionChunk),
        ("completions", {"prompt": "the cat"}, [], Completion, Completion),
        ("responses", ITEMS, [SAYS, SAYS], Response, ResponseStreamEvent),
        (
            "responses",
            {"input": "the cat", "max_output_tokens": 5},
            [],
            Response,
            ResponseStreamEvent,
        ),
        ("responses", {"input": "the cat"}, ["", ""], Response, ResponseStreamEvent),
    ],
)
async def test_answers_are_what_the_sdk_says(
    serving: Serving, path: str, body: Any, answers: list[str], whole: Any, part: Any
) -> None:
    """Whole answers and each event of a stream fit the SDK's types; their usage is the same."""
    async with serving(*answers) as service, client_of(service) as client:
        body = {"model": MODEL, **body}
        if path != "responses":
            body |= {"max_tokens": 40, "stream_options": {"include_usage": True}}
        answer = await client.post(f"/{path}", json=body)
        validated(whole, answer.json())
        await service.flow.forget()
        stream = await client.post(f"/{path}", json={**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream.text)
    for event in events:
        if part is Completion:  # its type has no null, which OpenAI's streams do have here
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        validated(part, event)
    last = events[-1].get("response", events[-1])
    for usage in (last["usage"], answer.json()["usage"]):
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        assert all(type(count) is int for count in details.values())


async def test_models_and_errors_are_too(serving: Serving) -> None:
    """... and the rest of what the SDK reads."""
    async with serving() as service, client_of(service) as client:
        validated(Model, (await client.get(f"/models/{MODEL}")).json())
        for wrong in ({}, {"model": "other", "messages": MESSAGES}):
            answer = await client.post("/chat/completions", json=wrong)
            validated(ErrorObject, answer.json()["error"])

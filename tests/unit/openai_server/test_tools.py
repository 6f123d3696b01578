"""Tool calls, through OpenAI's own client: found, forced, given back, and no prefix lost by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.unit.openai_server.conftest import MODEL, openai_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
]
ASK: list[Any] = [{"role": "user", "content": "weather in Oslo"}]
SAYS = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'


async def test_a_call_is_found_and_its_result_goes_on(serving: Serving) -> None:
    """The call comes back parsed; the next turn, with its result, has the whole first one in
    memory, for the call is rendered as the model wrote it."""
    async with serving(SAYS, "It rains.") as service, openai_of(service) as client:
        first = await client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"town": "Oslo"}
        said: Any = choice.message.to_dict()
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        again = await client.chat.completions.create(
            model=MODEL,
            messages=[*ASK, said, result],
            tools=TOOLS,
        )
    assert again.choices[0].message.content == "It rains."
    assert again.choices[0].finish_reason == "stop"
    before, after = first.to_dict(), again.to_dict()
    had = before["usage"]["total_tokens"] - 1  # type: ignore[index]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= had  # type: ignore[index]
    assert after["cacheflow"]["divergence"] is None  # type: ignore[index]


async def test_a_streamed_call_is_the_same_call(serving: Serving) -> None:
    """In a stream: the text, then the call with its name, id and arguments."""
    async with serving(SAYS) as service, openai_of(service) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, stream=True
        )
        deltas = [chunk.choices[0] async for chunk in stream if chunk.choices]
    text = "".join(each.delta.content or "" for each in deltas)
    (call,) = [call for each in deltas for call in each.delta.tool_calls or ()]
    assert text == "Let me look."
    assert (call.index, call.type) == (0, "function")
    assert call.id
    assert call.function is not None
    assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Oslo"}')
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "says", "name"),
    [
        ({"type": "function", "function": {"name": "clock"}}, "{}}\n</tool_call>", "clock"),
        ("required", 'weather", "arguments": {"town": "Bergen"}}\n</tool_call>', "weather"),
    ],
)
async def test_a_call_can_be_asked_for(serving: Serving, choice: Any, says: str, name: str) -> None:
    """With ``required`` or a named tool the answer begins as a call and the model goes on."""
    async with serving(says) as service, openai_of(service) as client:
        answer: Any = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice=choice
        )
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == [name]
    json.loads(calls[0].function.arguments)


async def test_with_none_a_call_is_text(serving: Serving) -> None:
    """``tool_choice: none`` leaves the prompt, and so its prefix, as it is, and reads no calls."""
    async with serving(SAYS) as service, openai_of(service) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none"
        )
    assert answer.choices[0].message.content == SAYS
    assert answer.choices[0].message.tool_calls is None


async def test_one_call_where_only_one_may_be(serving: Serving) -> None:
    """``parallel_tool_calls: false`` ends the answer behind the first call."""
    async with serving(SAYS + SAYS) as service, openai_of(service) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, parallel_tool_calls=False
        )
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_tool_that_is_not_there_is_refused(serving: Serving) -> None:
    """A choice among no tools, or of an unknown one, is a 400 that names the field."""
    async with serving() as service, openai_of(service) as client:
        named = {"type": "function", "function": {"name": "nothing"}}
        cases: list[tuple[Any, Any]] = [(TOOLS, named), (openai.omit, "required")]
        for tools, choice in cases:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model=MODEL, messages=ASK, tools=tools, tool_choice=choice
                )
            assert refused.value.param == "tool_choice"


async def test_responses_and_chat_share_a_prefix(serving: Serving) -> None:
    """A call made through responses, its result given back: found, and the prefix is in memory."""
    tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    async with serving(SAYS, "It rains.") as service, openai_of(service) as client:
        first = await client.responses.create(model=MODEL, input=ASK, tools=tools)
        said, call = first.output
        assert said.type == "message"
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        given: list[Any] = [*ASK, *(item.to_dict() for item in first.output), result]
        again = await client.responses.create(model=MODEL, input=given, tools=tools)
    assert again.output_text == "It rains."
    assert again.usage is not None
    assert first.usage is not None
    had = first.usage.total_tokens - 1
    assert again.usage.input_tokens_details.cached_tokens >= had


async def test_a_streamed_response_ends_as_the_whole_one(serving: Serving) -> None:
    """The last event has the response that a request without a stream gets; the events are
    numbered and add up to it."""
    tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    async with serving(SAYS, SAYS) as service, openai_of(service) as client:
        whole = await client.responses.create(model=MODEL, input=ASK, tools=tools)
        stream = await client.responses.create(model=MODEL, input=ASK, tools=tools, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == last.response.output_text == whole.output_text == "Let me look."
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == last.response.output
    assert [item.type for item in done] == [item.type for item in whole.output]

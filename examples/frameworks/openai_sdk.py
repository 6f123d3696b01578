"""The openai SDK: a tool call, a pause in which the server forgets, a prefetch at its end, and the
answer, streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from serving import HANDBOOK, MODEL, QUESTION, server, show, weather

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells what the weather is like in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def tell(turn: str, usage: CompletionUsage | None) -> None:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    show(turn, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": HANDBOOK},
        {"role": "user", "content": QUESTION},
    ]
    asked = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        prompt_cache_key="trip",
        max_completion_tokens=24,
    )
    tell("asked", asked.usage)
    calls = asked.choices[0].message.tool_calls
    assert calls
    call = calls[0]
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    messages.append({"role": "assistant", "tool_calls": [call.to_dict()]})  # type: ignore[list-item]
    result = weather(**json.loads(call.function.arguments))
    # While the tool does the last of its work, the context comes back: all but its result is known.
    so_far = {"messages": messages, "tools": [WEATHER], "prompt_cache_key": "trip"}
    client.post("/cacheflow/prefetch", body={"model": MODEL, **so_far}, cast_to=object)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER],
        tool_choice="none",
        prompt_cache_key="trip",
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in answer:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print()
            tell("resumed", chunk.usage)


if __name__ == "__main__":
    with server() as address:
        main(address)

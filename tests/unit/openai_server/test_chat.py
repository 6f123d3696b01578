"""Chat completions through OpenAI's own client: whole, streamed, several turns, refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.unit.openai_server.conftest import MODEL, client_of, openai_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

TALK: list[Any] = [
    {"role": "system", "content": "the cat and the dog sat on the mat " * 6},
    {"role": "user", "content": "hello"},
]


async def test_a_stream_is_the_whole_answer_in_pieces(serving: Serving) -> None:
    """Streamed or not: the same text, finish reason and token counts, cached ones included."""
    async with serving() as service, openai_of(service) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 24}
        await client.chat.completions.create(**asked, extra_body={"prompt_cache_key": "warm"})
        await service.flow.flush()
        await service.flow.forget()
        whole = await client.chat.completions.create(**asked)
        await service.flow.flush()
        await service.flow.forget()
        stream = await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert text == whole.choices[0].message.content
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    details, streamed = whole.usage.prompt_tokens_details, usage.prompt_tokens_details
    assert details is not None
    assert streamed is not None
    assert details.cached_tokens == streamed.cached_tokens
    assert type(details.cached_tokens) is int
    assert details.cached_tokens >= 64


async def test_the_next_turn_has_the_last_one_in_memory(serving: Serving) -> None:
    """A conversation that goes on is resident; one that was never seen has 0 cached tokens."""
    async with serving() as service, openai_of(service) as client:
        ask = client.chat.completions.create
        first = await ask(model=MODEL, messages=TALK, max_tokens=8)
        answer: Any = {"role": "assistant", "content": first.choices[0].message.content}
        again = await ask(
            model=MODEL,
            messages=[*TALK, answer, {"role": "user", "content": "and then"}],
            max_tokens=8,
        )
    assert cached_of(first) == 0
    assert cached_of(again) > 0


def cached_of(answer: Any) -> int:
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert type(cached) is int
    return cached


LONG = {"role": "user", "content": "word " * 3000}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "other"}, "model", "model_not_found"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 4000}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 4000}, "max_completion_tokens", "context_length_exceeded"),
    ({"messages": [LONG]}, "messages", "context_length_exceeded"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"presence_penalty": 1}, "presence_penalty", "unsupported_value"),
    ({"n": 2}, "n", "unsupported_value"),
    ({"logprobs": True}, "logprobs", "unsupported_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"nonsense": 1}, "nonsense", "unknown_parameter"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_is_refused_by_name(serving: Serving, stream: bool) -> None:
    """Every refusal is a 4xx in OpenAI's shape that names the field, also when a stream is asked
    for."""
    async with serving() as service, client_of(service) as client:
        for change, param, code in REFUSED:
            body = {"model": MODEL, "messages": TALK, "max_tokens": 4, "stream": stream} | change
            answer = await client.post("/chat/completions", json=body)
            assert answer.status_code in (400, 404), change
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, code)
            assert error["type"] in ("invalid_request_error", "not_found_error")
            assert error["message"]


async def test_malformed_json_is_a_400(serving: Serving) -> None:
    """A body that is no JSON gets an OpenAI error, with or without a content type."""
    async with serving() as service, client_of(service) as client:
        for headers in ({}, {"content-type": "application/json"}):
            answer = await client.post("/chat/completions", content=b'{"model":', headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"


async def test_openai_clients_raise_their_own_errors(serving: Serving) -> None:
    """Statuses and bodies are those that OpenAI's client knows."""
    async with serving() as service, openai_of(service) as client:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(model="other", messages=TALK)
        assert raised.value.code == "model_not_found"
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_a_seed_gives_the_same_answer_again(serving: Serving) -> None:
    """With a temperature tokens are drawn: the same for the same seed, also when the prompt is
    restored, others for another; without one, or with 0, the likeliest."""
    asked: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 12}
    async with serving() as service, openai_of(service) as client:

        async def said(**more: Any) -> object:
            answer = await client.chat.completions.create(**asked, **more)
            await service.flow.flush()
            await service.flow.forget()
            return answer.choices[0].message.content

        drawn = [await said(temperature=1.5, top_p=0.9, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        assert await said(temperature=1.5) != await said(temperature=1.5)
        assert await said() == await said(temperature=0, seed=4, top_p=0.5)

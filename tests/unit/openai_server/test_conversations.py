"""Conversations: who goes on with which, who never does, and what is said when a prompt leaves
its history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.openai_server.conftest import MODEL, client_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    import httpx2

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

SYSTEM: Any = {"role": "system", "content": "the cat and the dog sat on the mat " * 8}
HELLO: Any = {"role": "user", "content": "hello"}
TOOL: Any = {"type": "function", "function": {"name": "look"}}


async def ask(client: httpx2.AsyncClient, *messages: Any, **more: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": 8} | more
    answer = await client.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def said(answer: Any) -> Any:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"messages": [{**SYSTEM, "content": "now " + SYSTEM["content"]}]}, "message_changed", 0),
        ({"messages": [SYSTEM, {"role": "user", "content": "help"}]}, "message_changed", 1),
        ({"tools": [TOOL]}, "tools_changed", 0),
    ],
)
async def test_a_prompt_that_leaves_its_history_says_where(
    serving: Serving, change: Any, reason: str, message: int
) -> None:
    """The token, the message and the reason are in the answer, and counted."""
    async with serving("hi there") as service, client_of(service) as client:
        first = await ask(client, SYSTEM, HELLO, prompt_cache_key="k")
        assert first["cacheflow"]["divergence"] is None
        messages, tools = change.get("messages", [SYSTEM]), dict(change)
        tools.pop("messages", None)
        messages = [*messages, *([HELLO] if len(messages) == 1 else []), said(first), HELLO]
        again = await ask(
            client,
            *messages,
            prompt_cache_key="k",
            **{k: change[k] for k in change.keys() & {"tools"}},
        )
        divergence = again["cacheflow"]["divergence"]
        assert divergence["reason"] == reason
        assert divergence["message"] == message
        assert 0 < divergence["token"] < divergence["held_tokens"]
        metrics = (await client.get("http://server/metrics")).text
    line = f'cacheflow_server_prefix_divergences_total{{reason="{reason}"}} 1.0'
    assert line in metrics


@pytest.mark.parametrize("named", [{}, {"prompt_cache_key": "k"}])
async def test_another_chat_that_begins_alike_leaves_no_history(
    serving: Serving, named: dict[str, str]
) -> None:
    """A first turn that shares the template's tokens alone, or, where the client gives its
    conversations no name, a system prompt, rewrites nothing and is told nothing; one whose long
    system prompt has changed behind its first chunk is."""
    async with serving(*["yes"] * 6) as service, client_of(service) as client:
        for word in ("one", "two"):
            short = await ask(client, {"role": "user", "content": word}, **named)
            assert short["cacheflow"]["divergence"] is None
        for word in ("hello", "there"):
            answer = await ask(client, SYSTEM, {"role": "user", "content": word})
            assert answer["cacheflow"]["divergence"] is None
        dated = {**SYSTEM, "content": SYSTEM["content"] + "12:01"}
        answer = await ask(client, dated, HELLO)
    assert answer["cacheflow"]["divergence"]["reason"] == "message_changed"
    assert answer["cacheflow"]["divergence"]["message"] == 0


async def test_an_answer_that_comes_back_changed_is_told_from_one_cut_otherwise(
    serving: Serving,
) -> None:
    """An edited answer, and the same text in other tokens than the model had made."""
    async with serving("hi there") as service, client_of(service) as client:
        await ask(client, SYSTEM, HELLO, prompt_cache_key="k")
        edited = {"role": "assistant", "content": "hi hare"}
        again = await ask(client, SYSTEM, HELLO, edited, HELLO, prompt_cache_key="k")
        assert again["cacheflow"]["divergence"]["reason"] == "answer_changed"
        assert again["cacheflow"]["divergence"]["message"] == 2
        service.flow.engine.spell_out = True  # type: ignore[attr-defined]
        service.flow.engine.answers.append("the cat")  # type: ignore[attr-defined]
        first = await ask(client, SYSTEM, {**HELLO, "content": "b"}, prompt_cache_key="j")
        talk = (SYSTEM, {**HELLO, "content": "b"}, said(first), HELLO)
        again = await ask(client, *talk, prompt_cache_key="j")
    assert again["cacheflow"]["divergence"]["reason"] == "answer_retokenized"


async def test_an_edited_turn_keeps_what_is_before_it(serving: Serving) -> None:
    """A turn that is taken back goes on in the same session, whose memory up to there is used."""
    async with serving("one", "two") as service, client_of(service) as client:
        first = await ask(client, SYSTEM, HELLO, prompt_cache_key="k")
        other = {"role": "user", "content": "help me"}
        again = await ask(client, SYSTEM, other, prompt_cache_key="k")
        assert again["cacheflow"]["session"] == first["cacheflow"]["session"]
        assert cached(again) >= again["cacheflow"]["divergence"]["token"] - 1


async def test_another_conversation_under_one_name_is_a_branch(serving: Serving) -> None:
    """Prompts that only begin alike do not push each other out: both go on in memory."""
    async with serving() as service, client_of(service) as client:
        talks = []
        for name in ("a", "b"):
            long = {"role": "user", "content": f"{name} " * 300}
            answer = await ask(client, SYSTEM, long, prompt_cache_key="k", max_tokens=4)
            talks.append(((SYSTEM, long, said(answer), HELLO), answer))
        sessions = {answer["cacheflow"]["session"] for _, answer in talks}
        assert len(sessions) == 2
        for talk, before in talks:
            again = await ask(client, *talk, prompt_cache_key="k", max_tokens=4)
            assert again["cacheflow"]["session"] == before["cacheflow"]["session"]
            assert cached(again) >= before["usage"]["prompt_tokens"]


async def test_at_once_under_one_name_each_has_a_session(serving: Serving) -> None:
    """Requests of one name do not wait for each other, and say what each would say alone."""
    async with serving() as service, client_of(service) as client:
        talks = [(SYSTEM, {"role": "user", "content": f"number {n}"}) for n in range(4)]
        alone = [said(await ask(client, *talk)) for talk in talks]
        answers = await asyncio.gather(
            *(ask(client, *talk, prompt_cache_key="k") for talk in talks)
        )
    assert [said(answer) for answer in answers] == alone
    assert len({answer["cacheflow"]["session"] for answer in answers}) == 4


@pytest.mark.parametrize("apart", [{"cache_salt": "other"}, {"user": "other"}])
async def test_salts_and_users_are_kept_apart(serving: Serving, apart: dict[str, str]) -> None:
    """Another salt finds nothing, in memory or stored; another user finds no conversation, and
    with ``user_is_tenant`` nothing either. The same one finds all."""
    async with serving(user_is_tenant=True) as service, client_of(service) as client:
        await ask(client, SYSTEM, HELLO, prompt_cache_key="k")
        await service.flow.flush()
        other = await ask(client, SYSTEM, HELLO, prompt_cache_key="k", **apart)
        assert cached(other) == 0
        assert other["cacheflow"]["divergence"] is None
        await service.flow.flush()
        await service.flow.forget()
        same = await ask(client, SYSTEM, HELLO, prompt_cache_key="k", **apart)
    assert cached(same) >= 64


async def test_the_least_used_conversation_is_forgotten_first(serving: Serving) -> None:
    """No more conversations are known than are allowed, and the engine's memory is given back."""
    async with serving(max_sessions=2) as service, client_of(service) as client:
        for name in ("a", "b", "a", "c"):
            talk = (SYSTEM, {"role": "user", "content": name * 40})
            await ask(client, *talk, prompt_cache_key=name)
        assert len(service.conversations) == 2
        engine: Any = service.flow.engine
        assert {name.split("#")[0] for name in engine.open_requests} == {"a", "c"}


@pytest.mark.parametrize(
    "retention", [{"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"ttl": "30m"}}]
)
async def test_retention_is_taken(serving: Serving, retention: Any) -> None:
    """Both of OpenAI's ways to say how long are advice that is accepted."""
    async with serving() as service, client_of(service) as client:
        await ask(client, SYSTEM, HELLO, **retention)


async def test_a_prefetch_has_the_next_turn_in_memory(serving: Serving) -> None:
    """While a tool runs, what was stored is restored without an answer; the next turn finds it
    resident, in the same conversation."""
    async with serving("hi there") as service, client_of(service) as client:
        first = await ask(client, SYSTEM, HELLO, prompt_cache_key="k")
        await service.flow.flush()
        await service.flow.forget()
        talk = [SYSTEM, HELLO, said(first)]
        body = {"model": MODEL, "messages": talk, "prompt_cache_key": "k"}
        done = (await client.post("/cacheflow/prefetch", json=body)).json()
        assert done["session"] == first["cacheflow"]["session"]
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert done["usage"]["completion_tokens"] == 0
        again = await ask(client, *talk, HELLO, prompt_cache_key="k")
    details = again["usage"]["prompt_tokens_details"]
    assert again["cacheflow"]["session"] == first["cacheflow"]["session"]
    assert details["resident_tokens"] >= done["usage"]["prompt_tokens"] - 1
    assert details["loaded_tokens"] == 0

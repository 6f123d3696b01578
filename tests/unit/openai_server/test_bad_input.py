"""Requests that no client of good will sends: answered with a 4xx, never with a 5xx."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.openai_server.conftest import MODEL, client_of, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

HELLO = '"messages": [{"role": "user", "content": "hello"}]'
HALF = r"\ud800"
"""Half of a surrogate pair: JSON can write it, UTF-8 cannot."""
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"x": "%s"}}}'
CHAT = [
    f'"messages": [{{"role": "user", "content": "{HALF}"}}]',
    f'{HELLO}, "metadata": {{"a": "{HALF}"}}',
    f'{HELLO}, "tools": [{TOOL % HALF}]',
    f'{HELLO}, "user": "{HALF}"',
    f'{HELLO}, "prompt_cache_key": "{HALF}"',
    f'{HELLO}, "stop": "{HALF}"',
    f'{HELLO}, "temperature": NaN',
    f'{HELLO}, "top_p": Infinity',
    f'{HELLO}, "max_tokens": 1e400',
    f'{HELLO}, "seed": 1{"0" * 5000}',
    f'{HELLO}, "metadata": {"[" * 100_000}',
    f'{HELLO}, "tools": [{{"type": "function", "function": {{"name": "<script>"}}}}]',
    '"messages": [{"role": "tool", "content": "x"}]',
    '"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]',
    '"messages": [{"role": "user", "tool_calls": [], "content": null}]',
]
COMPLETION = [
    '"prompt": []',
    '"prompt": ""',
    '"prompt": [[]]',
    '"prompt": [1000000]',
    '"prompt": [-1]',
    '"prompt": ["a", "b"]',
    f'"prompt": "{HALF}"',
]
RESPONSE = [
    '"input": []',
    '"input": [{"type": "item_reference", "id": "x"}]',
    '"input": [{"type": "function_call", "name": "f"}]',
    '"input": "x", "previous_response_id": "resp_1"',
    '"input": "x", "tools": [{"type": "web_search"}]',
    f'"input": "x", "instructions": "{HALF}"',
    f'"input": "x", "metadata": {{"a": "{HALF}"}}',
]
REQUESTS = [
    (path, f'{{"model": "{MODEL}", "max_tokens": 2, {part}}}')
    for path, parts in (("chat/completions", CHAT), ("completions", COMPLETION))
    for part in parts
] + [("responses", f'{{"model": "{MODEL}", {part}}}') for part in RESPONSE]
ODD = ["null", "[]", '"x"', "1", "", "{}", '{"model": 1}', "\ufeff{}", "{" * 1000]


async def test_impossible_requests_are_the_clients_fault(serving: Serving) -> None:
    """Text that is no Unicode, numbers that are none, items that are not whole: a 400 in OpenAI's
    shape, and the server goes on."""
    bodies = [
        *REQUESTS,
        *((path, text) for path in ("chat/completions", "responses") for text in ODD),
    ]
    async with serving() as service, client_of(service) as client:
        for path, text in bodies:
            answer = await client.post(f"/{path}", content=text.encode())
            assert answer.status_code == 400, (path, text[:80], answer.text)
            assert answer.json()["error"]["message"]
        good = await client.post("/completions", json={"model": MODEL, "prompt": "the cat"})
        assert good.status_code == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the body is empty"),
        (b"[1]", "the body has to be a JSON object"),
        (b'{"model": "\xff"}', "it is not UTF-8"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "it holds a number that is too long"),
        (b'{"model": }', "the body is not valid JSON: Expecting value"),
    ],
)
async def test_what_is_wrong_with_a_body_is_said(
    serving: Serving, content: bytes, reason: str
) -> None:
    """And not that it could not be parsed."""
    async with serving() as service, client_of(service) as client:
        answer = await client.post("/chat/completions", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert reason in error["message"]


async def test_no_more_bodies_are_in_memory_than_can_wait(serving: Serving) -> None:
    """Connections that send slowly do not add up: those too many are sent away unread."""
    go_on = asyncio.Event()

    async def slowly() -> Any:
        yield b"{"
        await go_on.wait()
        yield b"}"

    async with serving(max_running=1, max_waiting=0) as service, client_of(service) as client:
        posts = [
            asyncio.create_task(client.post("/chat/completions", content=slowly()))
            for _ in range(40)
        ]
        await until(lambda: sum(post.done() for post in posts) >= 7)
        go_on.set()
        statuses = sorted([(await post).status_code for post in posts])
    assert statuses == [400] * 33 + [429] * 7


async def test_tool_schemas_of_any_size_and_depth(serving: Serving) -> None:
    """Far too many tools, or schemas nested deeper than any parser likes: answered, or refused as
    the client's fault; and meanwhile, and afterwards, others are served."""

    def tool(name: str, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def nested(depth: int) -> str:
        return '{"properties": {"x": ' * depth + "{}" + "}}" * depth

    wide = {"properties": {f"p{i}": {"type": "string", "enum": ["x"] * 9} for i in range(300)}}
    hello = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    bodies = [json.dumps({**hello, "tools": [tool(f"t{i}", {}) for i in range(2000)]})]
    bodies += [json.dumps({**hello, "tools": [tool("t", wide)]})]
    for depth in (40, 100, 200, 480, 1000, 5000):
        text = json.dumps({**hello, "tools": [tool("t", "HERE")]})
        bodies.append(text.replace('"HERE"', nested(depth)))
    async with serving() as service, client_of(service) as client:
        for body in bodies:
            post = asyncio.create_task(
                client.post("/chat/completions", content=body.encode(), timeout=100)
            )
            health = await client.get("http://server/health")
            assert health.status_code == 200
            answer = await post
            assert answer.status_code in (200, 400, 413), (body[:200], answer.text[:500])
        good = await client.post("/completions", json={"model": MODEL, "prompt": "the cat"})
        assert good.status_code == 200

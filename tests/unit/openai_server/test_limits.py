"""Limits that hold: keys, bodies, queues, times, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.plugins.openai_server import create_app
from tests.unit.openai_server.conftest import CONTEXT, MODEL, client_of, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the cat"}]}
KEYS = [{"key": "secret-one", "tenant": "a"}, {"key": "secret-two", "tenant": "b"}]


def chat_scope() -> Any:
    """A request as an ASGI server tells it."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
    }


async def test_keys_protect_v1_and_name_tenants(serving: Serving) -> None:
    """Without a key, or with a wrong one, /v1 answers 401; health needs none; what one key's
    tenant stored, another's does not find."""
    long = {**BODY, "messages": [{"role": "user", "content": "the cat " * 60}], "max_tokens": 4}
    async with serving(api_keys=KEYS) as service, client_of(service) as client:
        for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "secret-one"}):
            answer = await client.post("/chat/completions", json=BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("http://server/health")).status_code == 200
        found = []
        for key in ("secret-one", "secret-one", "secret-two"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/chat/completions", json=long, headers=headers)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            await service.flow.flush()
    assert found[0] == found[2] == 0
    assert found[1] > 0


async def test_a_body_that_is_too_large_is_not_read(serving: Serving) -> None:
    """Whether its length is told or not, 413, and no more of it is read than is allowed."""
    read = 0

    async def parts() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1000
            yield b" " * 1000

    async with serving(max_body_bytes=5000) as service, client_of(service) as client:
        told = await client.post("/chat/completions", content=b" " * 6000)
        assert told.status_code == 413
        streamed = await client.post("/chat/completions", content=parts())
        assert streamed.status_code == 413
        assert streamed.json()["error"]["code"] == "request_too_large"
    assert read <= 7000


async def test_a_body_no_prompt_can_need_is_not_read(serving: Serving) -> None:
    """Larger than any prompt that the context holds: 413, before it is parsed and tokenized."""
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 200_000}]}
    async with serving() as service, client_of(service) as client:
        answer = await client.post("/chat/completions", json=body)
        assert answer.status_code == 413
        shorter = {**BODY, "messages": [{"role": "user", "content": "x" * 100_000}]}
        answer = await client.post("/chat/completions", json=shorter)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_too_many_requests_are_sent_away(serving: Serving) -> None:
    """With one place and one in the queue, the third gets 429 and Retry-After at once; the other
    two are answered."""
    async with serving(max_running=1, max_waiting=1) as service, client_of(service) as client:
        busy = asyncio.create_task(
            client.post("/chat/completions", json={**BODY, "max_tokens": 200})
        )
        await until(lambda: service.admission.running)
        waiting = asyncio.create_task(
            client.post("/chat/completions", json={**BODY, "max_tokens": 2})
        )
        await until(lambda: service.admission.waiting)
        refused = await client.post("/chat/completions", json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await busy).status_code == (await waiting).status_code == 200
        metrics = (await client.get("http://server/metrics")).text
    assert 'cacheflow_server_rejected_total{reason="busy"} 1.0' in metrics
    assert 'requests_total{endpoint="/v1/chat/completions",status="429"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_ended(serving: Serving, stream: bool) -> None:
    """504 before the first token; in a stream that has begun, an error as its last event. The
    engine is free afterwards."""
    body = {**BODY, "max_tokens": 900, "stream": stream}
    async with serving(request_seconds=0.3) as service, client_of(service) as client:
        answer = await client.post("/chat/completions", json=body)
        if stream:
            last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "timeout"
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
        assert service.admission.running == 0
        await service.flow.forget()
        assert service.flow.engine.kv_used_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(serving: Serving, stream: bool) -> None:
    """The generation stops soon after the disconnect, its place is free, the turn is kept."""
    gone, sent = asyncio.Event(), list[Any]()
    body = json.dumps({**BODY, "max_tokens": 900, "stream": stream}).encode()
    told = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in told:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with serving() as service:
        request = asyncio.ensure_future(create_app(service)(chat_scope(), receive, send))
        await until(lambda: service.flow.decoding.steps >= 5)
        gone.set()
        await request
        steps = service.flow.decoding.steps
        assert service.admission.running == 0
        assert steps < 200
        metrics = service.series.registry
        labels = {"endpoint": "/v1/chat/completions", "status": "499"}
        assert metrics.get_sample_value("cacheflow_server_requests_total", labels) == 1.0
        await service.flow.forget()
        assert service.flow.engine.kv_used_bytes == 0  # type: ignore[attr-defined]
    assert not any(message.get("more_body") is False for message in sent)


@pytest.mark.parametrize("late", [False, True])
async def test_a_client_that_stops_reading_ends_its_request(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Its place is free after a while, whether the answer or the error at the end of its time is
    what it does not take."""
    allowed = "cacheflow.plugins.openai_server.exchange._STALLED_SECONDS"
    if not late:
        monkeypatch.setattr(allowed, 0.2)
    body = json.dumps({**BODY, "max_tokens": 900, "stream": True}).encode()
    told = iter([{"type": "http.request", "body": body, "more_body": False}])
    forever, sent = asyncio.Event(), list[Any]()

    async def receive() -> Any:
        for message in told:
            return message
        return await forever.wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= 3:
            monkeypatch.setattr(allowed, 0.2)  # the next message gets as little; this one may rest
            await forever.wait()

    async with serving(request_seconds=3.0 if late else 60.0) as service:
        async with asyncio.timeout(20):
            await create_app(service)(chat_scope(), receive, send)
        assert service.admission.running == 0
        await service.flow.forget()
        assert service.flow.engine.kv_used_bytes == 0  # type: ignore[attr-defined]
    assert len(sent) == (4 if late else 3)


async def test_what_no_endpoint_answers_has_no_label_of_its_own(serving: Serving) -> None:
    """Paths of strangers are counted together; wrong paths and methods get OpenAI's shape."""
    async with serving() as service, client_of(service) as client:
        for path in ("/one", "/two"):
            assert (await client.get(path)).json()["error"]["type"] == "not_found_error"
        wrong = await client.get("/chat/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert wrong.json()["error"]["message"]
        metrics = (await client.get("http://server/metrics")).text
    assert 'requests_total{endpoint="other",status="404"} 2.0' in metrics


async def test_out_of_kv_memory_is_said(serving: Serving) -> None:
    """A prompt that the engine's memory cannot hold gets a 503 with Retry-After, and the next
    one that fits is answered."""
    async with serving(kv_bytes=300_000) as service, client_of(service) as client:
        large = {**BODY, "messages": [{"role": "user", "content": "x" * 900}], "max_tokens": 1}
        refused = await client.post("/chat/completions", json=large)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "out_of_memory"
        answer = await client.post("/chat/completions", json={**BODY, "max_tokens": 1})
        assert answer.status_code == 200


async def test_completions_that_do_not_say_make_what_fits(serving: Serving) -> None:
    """Without ``max_tokens`` there are 16 of them, or fewer at the end of the context: a default is
    not blamed for being too many."""
    async with serving() as service, client_of(service) as client:
        for held, made in ((8, 16), (CONTEXT - 4, 5)):
            body = {"model": MODEL, "prompt": [5] * held}
            answer = await client.post("/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == made
            assert answer.status_code == 200
        answer = await client.post("/completions", json={**body, "max_tokens": 6})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"


async def test_stop_sequences_end_an_answer_that_is_kept(serving: Serving) -> None:
    """The text ends before the sequence; the turn so far is in memory for the next one."""
    async with serving("one two three") as service, client_of(service) as client:
        body = {**BODY, "stop": [" three"], "prompt_cache_key": "k"}
        first = (await client.post("/chat/completions", json=body)).json()
        (choice,) = first["choices"]
        assert choice["message"]["content"] == "one two"
        assert choice["finish_reason"] == "stop"
        talk = [*BODY["messages"], choice["message"], {"role": "user", "content": "and"}]
        body = {**BODY, "messages": talk, "prompt_cache_key": "k", "max_tokens": 1}
        again = (await client.post("/chat/completions", json=body)).json()
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]


async def test_a_connection_that_was_reset_under_an_answer_is_no_error(serving: Serving) -> None:
    """uvloop refuses to write to it before it tells that it is lost: nobody is left to be told, and
    no trace is worth a line of the log."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    told = [{"type": "http.disconnect"}, {"type": "http.request"}] * 2

    async def receive() -> Any:
        return told.pop()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as listener:
        _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.transport.abort()
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="closed"):
            writer.transport.write(b"x")
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            writer.transport.write(b"x")

        async with serving() as service:
            for path in ("/health", "/v1/models"):
                scope = chat_scope() | {"method": "GET", "path": path, "raw_path": path.encode()}
                await create_app(service)(scope, receive, send)
    assert told == []  # who has gone is waited for
    assert [message["type"] for message in sent[:2]] == [
        "http.response.start",
        "http.response.body",
    ]

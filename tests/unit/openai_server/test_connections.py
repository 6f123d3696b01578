"""Real sockets that bring no request, or half of one, or do not read: none of them stays."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from cacheflow.plugins.openai_server import connections
from cacheflow.plugins.openai_server.serving import server_of
from tests.unit.openai_server.conftest import MODEL, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def listening(serving: Serving, **options: Any) -> AsyncIterator[tuple[Service, int]]:
    """A server on a port of its own, in this process."""
    async with serving(port=0, **options) as service:
        server = server_of(service)
        task = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started)
            yield service, server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            await task


def rejected(service: Service, reason: str) -> float:
    name = "cacheflow_server_rejected_total"
    return service.series.registry.get_sample_value(name, {"reason": reason}) or 0.0


async def connected(stack: AsyncExitStack, port: int, sends: bytes = b"") -> asyncio.StreamReader:
    """A socket that has said ``sends``; closed with ``stack``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(sends)
    return reader


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("sends", "answered"),
    [(b"", b""), (b"G", b"408"), (HEAD, b"408")],
)
async def test_who_brings_no_request_is_sent_away(
    serving: Serving, sends: bytes, answered: bytes
) -> None:
    """Nothing at all, or half a head."""
    async with (
        listening(serving, header_seconds=0.05) as (service, port),
        AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        reader = await connected(stack, port, sends)
        said = await reader.read()
        assert said[9:12] == answered
        assert rejected(service, "slow_head") == 1


async def test_half_a_head_behind_a_request_is_no_better(serving: Serving) -> None:
    """A connection that is kept alive has as long for its next request."""
    async with (
        listening(serving, header_seconds=0.5) as (service, port),
        asyncio.timeout(60),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(HEAD + b"\r\n")
            assert (await reader.readline())[9:12] == b"200"
            await reader.readuntil(b'{"status":"ok"}')
            writer.write(HEAD)
            assert (await reader.read())[9:12] == b"408"
            assert rejected(service, "slow_head") == 1
        finally:
            writer.close()


async def test_slow_heads_do_not_keep_others_out(serving: Serving) -> None:
    """Two hundred sockets with half a head, more than there may be: a client among them is served
    all the same, the oldest of them go for it, and none keeps a place."""
    async with (
        listening(serving, header_seconds=600, max_connections=20) as (service, port),
        AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        readers = [await connected(stack, port, HEAD) for _ in range(200)]
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert await readers[0].read() == b""
        await until(lambda: rejected(service, "connections") >= 180)


async def test_where_all_connections_have_a_request(serving: Serving) -> None:
    """One more is told to come again, in OpenAI's words."""
    async with (
        listening(serving, max_connections=1) as (_, port),
        AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        body = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
        await connected(stack, port, body)
        one = await connected(stack, port, HEAD + b"\r\n")
        said = await one.read()
        head, _, text = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(text)["error"]["code"] == "connections"


async def test_a_head_without_an_end_is_not_read(serving: Serving) -> None:
    """Not more of it than any client needs."""
    async with (
        listening(serving) as (_, port),
        AsyncExitStack() as stack,
        asyncio.timeout(60),
    ):
        more = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(80))
        reader = await connected(stack, port, HEAD + more)
        said = await reader.read()
        assert said[9:12] in (b"431", b"400")
        async with httpx2.AsyncClient(timeout=60) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


async def test_who_does_not_read_is_cut_off(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document over and over, into a socket that nobody reads from."""
    monkeypatch.setattr(connections, "_STALLED_SECONDS", 0.05)
    async with (
        listening(serving) as (service, port),
        asyncio.timeout(60),
    ):
        asked = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        transport: Any = writer.transport
        try:
            transport.pause_reading()
            writer.write(asked)
            await until(lambda: rejected(service, "stalled") == 1)
        finally:
            transport.abort()

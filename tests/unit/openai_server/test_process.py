"""A real server process: it ends as it should, and its clients may go away."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from cacheflow.kv import parse_name
from tests.unit.openai_server.conftest import MODEL, client_of, service_over
from tests.unit.openai_server.process import served, until_true

if TYPE_CHECKING:
    from pathlib import Path

TALK = [{"role": "user", "content": "the cat and the dog sat on the mat " * 50}]
BODY: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 8}


def value(url: str, line: str) -> float:
    """A sample of the server's metrics; 0 where there is none yet."""
    samples = httpx2.get(f"{url}/metrics", timeout=30).text.splitlines()
    return next((float(s.rsplit(" ", 1)[1]) for s in samples if s.startswith(f"{line} ")), 0.0)


def test_a_server_drains_and_the_next_one_has_its_kv(chat_model: Path, tmp_path: Path) -> None:
    """A client that disconnects ends its request. After SIGTERM a stream under way comes to its
    end, others are sent away, the process ends with 0, and the next one restores what was said."""
    with served(chat_model, tmp_path) as server, ExitStack() as stack:
        assert f"loading the model in {chat_model}" in server.log.read_text()
        url, client = server.url, stack.enter_context(httpx2.Client(timeout=60))
        long = {**BODY, "max_tokens": 300, "stream": True}
        post = ("POST", f"{url}/v1/chat/completions")
        with client.stream(*post, json=long) as stream:
            next(stream.iter_lines())
        gone = 'cacheflow_server_requests_total{endpoint="/v1/chat/completions",status="499"}'
        until_true(lambda: value(url, gone) == 1.0)
        assert value(url, "cacheflow_server_running") == 0.0

        with client.stream(*post, json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            until_true(lambda: httpx2.get(f"{url}/ready").status_code == 503)
            refused = httpx2.post(f"{url}/v1/chat/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        client.close()
        assert server.process.wait(60) == 0, server.log.read_text()

    async def asked_again() -> Any:
        async with (
            service_over(chat_model, tmp_path, grid=None, chunk_tokens=256) as service,
            client_of(service) as client,
        ):
            return (await client.post("/chat/completions", json=BODY)).json()

    details = asyncio.run(asked_again())["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 256
    assert details["resident_tokens"] == 0


def is_object(name: str) -> bool:
    """Whether a store's file of that name is a whole object."""
    try:
        parse_name(name)
    except ValueError:
        return False
    return True


@pytest.mark.timeout(400)
def test_a_server_killed_in_the_middle_of_an_answer(chat_model: Path, tmp_path: Path) -> None:
    """SIGKILL while a stream is under way: the client's stream breaks off, and the next server over
    the same folder has what was stored by then, and says the same as one that has nothing."""

    def objects() -> list[Path]:
        return [path for path in (tmp_path / "kv").rglob("*") if is_object(path.name)]

    body = {**BODY, "max_tokens": 300, "stream": True}
    with served(chat_model, tmp_path) as server, httpx2.Client(timeout=120) as client:
        url = f"{server.url}/v1/chat/completions"
        assert client.post(url, json=BODY).status_code == 200
        until_true(objects)
        with client.stream("POST", url, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.kill()
            with pytest.raises(httpx2.TransportError):
                list(lines)

    async def asked(folder: Path) -> tuple[str, int]:
        async with (
            service_over(chat_model, folder, grid=None, chunk_tokens=256) as service,
            client_of(service) as client,
        ):
            answer = (await client.post("/chat/completions", json=BODY)).json()
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["message"]["content"], details["cached_tokens"]

    text, cached = asyncio.run(asked(tmp_path))
    assert cached >= 256
    assert asyncio.run(asked(tmp_path / "empty")) == (text, 0)

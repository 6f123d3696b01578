"""A tiny random chat model with a tokenizer of its own, a service over it, and a client."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from cacheflow.plugins.openai_server import ServerSettings, create_app, opened_service
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.settings import Settings
from cacheflow.testing.chat_model import save_chat_model
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.plugins.openai_server.service import Service

MODEL = "tiny-chat"
GRID = TileGrid((32, 32, 64), 64)
CHUNK = 16
CONTEXT = 1024


class ScriptedEngine(TransformersEngine):
    """The real engine, KV and all, that says what it is told to: a random model calls no tools."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.answers: deque[str] = deque()
        """What is said next, one a turn; the model's own words when there are no more."""
        self.spell_out = False
        """Say it letter by letter, as no tokenizer would cut it."""
        self._saying: dict[str, Iterator[int]] = {}

    async def first_token(self, request_id: str) -> int:
        token = await super().first_token(request_id)
        self._saying.pop(request_id, None)
        if self.answers:
            self._saying[request_id] = iter(self._tokens_of(self.answers.popleft()))
        return self._instead(request_id, token)

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        made = await super().decode(request_ids, tokens)
        return [self._instead(name, token) for name, token in zip(request_ids, made, strict=True)]

    def _tokens_of(self, text: str) -> list[int]:
        assert self.chat is not None
        parts = list(text) if self.spell_out else [text]
        return [*(t for part in parts for t in self.chat.encode(part)), *self.chat.stop_tokens]

    def _instead(self, request_id: str, token: int) -> int:
        return next(self._saying.get(request_id, iter(())), token)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder; not to be changed."""
    return save_chat_model(tmp_path_factory.mktemp("models") / MODEL, CONTEXT)


@asynccontextmanager
async def service_over(
    model: Path,
    folder: Path,
    answers: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> AsyncIterator[Service]:
    """A service over the tiny model that says ``answers`` first, with its store in ``folder``."""
    chosen = {"grid": GRID, "chunk_tokens": CHUNK, "kv_bytes": 64 << 20, **engine_options}
    engine = await ScriptedEngine.open_model(model, dtype="float32", device="cpu", **chosen)
    engine.answers.extend(answers)
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(folder / "kv")}}
    settings, server = (
        Settings(tiers=(tier,), staging_bytes=1 << 24),
        ServerSettings(**options or {}),
    )
    try:
        async with opened_service(engine, MODEL, settings, server) as service:
            yield service
    finally:
        await engine.aclose()


@pytest.fixture
def serving(
    chat_model: Path, tmp_path: Path
) -> Callable[..., AbstractAsyncContextManager[Service]]:
    """``async with serving("an answer", max_running=1) as service``: over the tiny model."""

    def opened(
        *answers: str, kv_bytes: int = 64 << 20, **options: Any
    ) -> AbstractAsyncContextManager[Service]:
        return service_over(chat_model, tmp_path, answers, options, kv_bytes=kv_bytes)

    return opened


async def until(true: Callable[[], object]) -> None:
    """Let the loop run until ``true()``, half a minute at most."""
    async with asyncio.timeout(30):
        for _ in itertools.count():
            if true():
                return
            await asyncio.sleep(0.001)


@asynccontextmanager
async def client_of(service: Service, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that talks to the application in process."""
    transport = httpx2.ASGITransport(create_app(service))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://server/v1", timeout=60, **options
    ) as client:
        yield client


@asynccontextmanager
async def openai_of(service: Service, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client on the application in process; it never tries again by itself."""
    async with client_of(service) as http:
        yield openai.AsyncOpenAI(
            api_key=key, base_url="http://server/v1", http_client=http, max_retries=0
        )

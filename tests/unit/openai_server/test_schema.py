"""What the OpenAPI document says holds: schemathesis tries every operation of a real server.

A full run (``CACHEFLOW_FULL=1``) tries 33 times as many requests.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from cacheflow.plugins.openai_server import create_app
from tests.conftest import FULL
from tests.unit.openai_server.conftest import MODEL, service_over, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = 200 if FULL else 6
"""Of each operation, as many that fit the document and as many that do not."""
ANSWERED = frozenset(
    {"messages", "prompt", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stream", "metadata"}
    | {"stream_options", "user", "cache_salt", "prompt_cache_key", "prompt_cache_options"}
)
"""Fields that can be asked for, so that most requests that fit the document reach the model."""


@pytest.fixture(scope="module")
def api(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document, as a server on a socket gives it; the server has a thread of its own."""
    listening: Future[uvicorn.Server] = Future()

    async def serve() -> None:
        folder = tmp_path_factory.mktemp("schema")
        limits = {"default_max_tokens": 2, "max_body_bytes": 1 << 16}
        async with service_over(chat_model, folder, options=limits) as service:
            app = create_app(service)
            server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve())
            await until(lambda: server.started)
            listening.set_result(server)
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    server = listening.result(timeout=60)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_answer_breaks_the_schema(api: Any, mode: GenerationMode) -> None:
    """No 5xx, no undocumented status or content type, no body that is not as documented; what the
    document forbids is refused."""
    operations = [found.ok() for found in api.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/metrics"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # nothing that is not allowed can be asked there

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                answerable = {name: case.body[name] for name in ANSWERED & case.body.keys()}
                case.body = {**answerable, "model": MODEL}
            # A request may fit the document and ask for another model, or for what cannot be.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()

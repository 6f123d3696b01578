"""What the OpenAPI document says holds: schemathesis tries every operation of a real server.

A full run (``CACHEFLOW_FULL=1``) tries 20 times as many requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.conftest import FULL
from tests.unit.openai_server.conftest import MODEL
from tests.unit.openai_server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = 200 if FULL else 10
"""Of each operation, as many that fit the document and as many that do not."""
ANSWERED = frozenset(
    {"messages", "prompt", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stream", "metadata"}
    | {"stream_options", "user", "cache_salt", "prompt_cache_key", "prompt_cache_options"}
)
"""Fields that can be asked for, so that most requests that fit the document reach the model."""


@pytest.fixture(scope="module")
def api(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document, as the server gives it."""
    folder = tmp_path_factory.mktemp("schema")
    with served(chat_model, folder, default_max_tokens="2", max_body_bytes="64KiB") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


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

"""One vLLM at a time, on a small random Llama in float32, with a store that tests steer.

Collected only where vLLM is installed: `make test-vllm` (its start takes most of a minute, so tests
share engines).
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.serving import Serving

HAVE_VLLM = find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]


def pytest_report_header() -> str:
    return "" if HAVE_VLLM else "tests/vllm: not collected, there is no vLLM here (make test-vllm)"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    """A Llama of four layers whose greedy tokens differ from prompt to prompt."""
    from cacheflow.testing.vllm_engine import random_llama

    return random_llama(folder)


@pytest.fixture(scope="session")
def expected(model: Path, folder: Path) -> dict[tuple[int, ...], list[int]]:
    """What plain vLLM says after each prompt of the tests: an engine without CacheFlow."""
    from tests.vllm.prompts import PROMPTS
    from tests.vllm.serving import NEW_TOKENS, Serving

    with Serving.serve(model, folder, plain=True) as plain:
        outputs = plain.generate(PROMPTS, tokens=NEW_TOKENS)
    return {tuple(p): tokens for p, tokens in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture(scope="module")
def serving(request: pytest.FixtureRequest, model: Path, folder: Path) -> Iterator[Serving]:
    """vLLM with CacheFlow; a module's ``ENGINE`` says how it differs from the usual."""
    from tests.vllm.serving import Serving

    options = getattr(request.module, "ENGINE", {})
    request.getfixturevalue("expected")  # its engine has to be gone before the next one starts
    with Serving.serve(model, folder, **options) as serving:
        yield serving


@pytest.fixture(autouse=True)
def _steered_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test finds a fast, sound store, and leaves no block behind."""
    if "serving" not in request.fixturenames:
        yield
        return
    serving: Serving = request.getfixturevalue("serving")
    serving.steer()
    yield
    serving.steer()
    assert serving.used_share() == 0.0, "blocks leaked"


os.environ.setdefault("CACHEFLOW_KEEP_COSTS", "0")
os.environ.setdefault("CACHEFLOW_KEEP_DEPARTURES", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

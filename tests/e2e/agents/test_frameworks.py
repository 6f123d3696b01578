"""The examples with agent frameworks as people run them, against one real server and model.

The server keeps one conversation in memory, and each example's tool has it serve another one: so
what a resumed turn finds cached was stored and restored, not kept.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx2
import pytest

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers import prepare_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMEWORKS = Path(__file__).parents[3] / "examples" / "frameworks"
CHUNK = 256

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the frameworks' own
]


class Told(NamedTuple):
    """A line of an example about a turn."""

    turn: str
    prompt: int
    cached: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    from serving import started

    try:
        model = prepare_smollm2()
    except ConfigError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    with started(model, tmp_path_factory.mktemp("kv")) as url:
        yield url


@pytest.fixture
def told(
    server: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[Told]:
    """What the example named by the parameter says of its turns."""
    monkeypatch.setenv("CACHEFLOW_URL", server)
    runpy.run_path(str(FRAMEWORKS / f"{request.param}.py"), run_name="__main__")
    said = capsys.readouterr().out
    lines = re.findall(r"(\w+): (\d+) prompt tokens, (\d+) of them cached", said)
    return [Told(turn, int(prompt), int(cached)) for turn, prompt, cached in lines]


def loaded_tokens(url: str) -> float:
    """Tokens whose KV came from the disk, as the server counts them."""
    counted = httpx2.get(f"{url}/metrics").text
    name = 'cacheflow_restore_tokens_total{source="disk"}'
    values = [line.split()[-1] for line in counted.splitlines() if line.startswith(name)]
    return float(values[0]) if values else 0.0


@pytest.mark.parametrize(
    "told",
    ["openai_sdk", "openai_agents_sdk", "smolagents_tool", "pydantic_ai_tool"],
    indirect=True,
)
def test_a_framework_resumes_after_its_tool(told: list[Told], server: str) -> None:
    """The turn before the tool and the one after; the latter's prompt is longer, and the
    framework itself reports that its whole chunks were cached."""
    assert [each.turn for each in told] == ["asked", "resumed"]
    asked, resumed = told
    assert resumed.prompt > asked.prompt
    assert resumed.cached >= asked.prompt // CHUNK * CHUNK > 0
    assert loaded_tokens(server) > 0


@pytest.mark.parametrize("told", ["langgraph_branches"], indirect=True)
def test_branches_of_a_checkpoint_share_it(told: list[Told]) -> None:
    """Two branches from one LangGraph checkpoint: each begins with the conversation so far, and
    finds its whole chunks."""
    assert [each.turn for each in told] == ["asked", "resumed", "branch", "branch"]
    resumed = told[1]
    for branch in told[2:]:
        assert branch.prompt > resumed.prompt
        assert branch.cached >= resumed.prompt // CHUNK * CHUNK > 0

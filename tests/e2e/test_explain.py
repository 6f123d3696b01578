"""`cacheflow explain` on a store that a real engine filled: what it says of each kind of miss."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ByteSize
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.cli.explain_run import _Reader
from cacheflow.kv import chunk_keys, key_root
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.registry import load_backend
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings, TierSettings
from cacheflow.types import PAGE

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 256
OTHER = [(11 * i) % 250 + 1 for i in range(CHUNK + 9)]
PROMPT = [(7 * i) % 250 + 1 for i in range(4 * CHUNK + 30)]


@pytest.fixture(scope="module")
def store(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the four chunks of ``PROMPT`` but the second."""
    folder = tmp_path_factory.mktemp("explain") / "kv"

    async def fill() -> None:
        engine = await TransformersEngine.open_model(model_folder, dtype="float32")
        tier = TierSettings(name="disk", backend="nvme", options={"path": str(folder)})
        async with CacheFlow.open(Settings(tiers=(tier,), keep_costs=False), engine=engine) as flow:
            async for _ in flow.session("a").generate(PROMPT, max_new_tokens=1):
                pass
            assert await flow.flush(30)
        keys = chunk_keys(key_root(engine.identity), PROMPT, CHUNK)
        await engine.aclose()
        backend = await load_backend("nvme").open({"path": str(folder)})
        (there,) = await backend.lookup([keys[1]])
        await backend.delete([info.key for info in there])
        await backend.aclose()

    asyncio.run(fill())
    return folder


class Explain:
    """Runs the command on prompts given as tokens."""

    def __init__(self, folder: Path, store: Path, model: Path) -> None:
        self.folder, self.store, self.model = folder, store, model

    def __call__(self, tokens: list[int], *more: object, code: int = 1) -> dict[str, Any]:
        path = self.folder / "prompt.json"
        path.write_text(json.dumps(tokens))
        options = ["-f", self.store, "--model", self.model, "--dtype", "float32", "--json", *more]
        result = CliRunner().invoke(app, ["explain", str(path), *map(str, options)])
        assert result.exit_code == code, result.output
        found = json.loads(result.stdout)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def explain(tmp_path: Path, store: Path, model_folder: Path) -> Explain:
    return Explain(tmp_path, store, model_folder)


def test_a_hole_is_told_from_another_prompt(explain: Explain) -> None:
    """Chunks behind the missing one prove that the prompt is the same."""
    found = explain(PROMPT)
    assert [(run["start"], run["stop"], run["tiers"]["disk"]) for run in found["runs"]] == [
        (0, 256, "stored"),
        (256, 512, "absent"),
        (512, 1024, "stored"),
    ]
    assert found["first_missing_token"] == CHUNK
    assert "whose key holds them, is stored: they were evicted" in found["why"][0]


def test_what_is_all_there_is_said_so(explain: Explain) -> None:
    """And the exit code is 0."""
    found = explain(PROMPT[: CHUNK + 3], code=0)
    assert found["first_missing_token"] is None
    assert found["why"] == [
        "all whole chunks are stored: they are restored, or recomputed if that is faster"
    ]
    assert "shorter than a chunk" in explain(PROMPT[:9], code=0)["why"][0]


def test_the_first_divergent_token_is_named(explain: Explain, tmp_path: Path) -> None:
    """With what was sent before: its position, and the tokens on both sides."""
    before = tmp_path / "before.json"
    before.write_text(json.dumps(PROMPT[:800]))
    changed = [*PROMPT[:300], 251, *PROMPT[301:]]
    found = explain(changed, "--before", before)
    assert found["first_divergent_token"] == 300
    assert "at token 300, in chunk 1" in found["why"][0]
    assert f"came [{PROMPT[300]}," in found["why"][0]
    assert "now [251," in found["why"][0]
    assert "goes on from all 800 tokens" in explain(PROMPT, "--before", before)["why"][0]


def test_what_was_evicted_is_told_from_what_was_never_written(
    explain: Explain, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the process that served has kept of what left its tier, which has room for three of
    the four chunks of a prompt, and then for one of another's."""
    monkeypatch.setenv("CACHEFLOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHEFLOW_KEEP_DEPARTURES", "1")
    folder = tmp_path / "kv"

    async def serve() -> None:
        engine = await TransformersEngine.open_model(model_folder, dtype="float32")
        room = ByteSize(1 << 20)
        assert room // (engine.layout.payload_bytes() + 3 * PAGE) == 3
        tier = TierSettings(
            name="disk",
            backend="nvme",
            options={"path": str(folder)},
            capacity_bytes=room,
            eviction="lru",  # cost-aware may decline what is computed as quickly
        )
        async with CacheFlow.open(Settings(tiers=(tier,), keep_costs=False), engine=engine) as flow:
            for name, prompt in (("a", PROMPT[: 3 * CHUNK + 5]), ("b", OTHER)):
                async for _ in flow.session(name).generate(prompt, max_new_tokens=1):
                    pass
                assert await flow.flush(30)
        await engine.aclose()

    asyncio.run(serve())
    explain.store = folder
    found = explain(PROMPT)
    states = [run["tiers"]["disk"] for run in found["runs"]]
    assert "evicted (capacity)" in states
    assert states[-1] == "never written (no trace of it)"
    assert "(disk: evicted (capacity))" in found["why"][0]
    never = explain([5, *PROMPT[1:]])
    assert [run["tiers"]["disk"] for run in never["runs"]] == ["never written (no trace of it)"]


def test_another_prompt_tenant_or_model(
    explain: Explain, other_model_folder: Path, tmp_path: Path
) -> None:
    """Where nothing is found, what the store holds instead says which part of the key differs."""
    another = explain([9, *PROMPT[1:]])
    assert another["why"][0] == "nothing of it is stored"
    assert another["why"][1].startswith(
        "disk holds 3 objects of this model and tenant, of other prompts: this one differs within"
    )
    assert "3 of another tenant (salt)" in explain(PROMPT, "--tenant", "b")["why"][1]
    explain.model = other_model_folder
    assert "3 of another model" in explain(PROMPT)["why"][1]


def test_a_chat_request_is_read_with_its_tools(tmp_path: Path) -> None:
    """As the server renders it: tools are part of the prompt."""

    class Chat:
        def render(self, messages: list[Any], tools: list[Any] | None) -> list[int]:
            return [len(messages), len(tools or ())]

    path = tmp_path / "request.json"
    talk = [{"role": "user", "content": "hi"}]
    read = _Reader(SimpleNamespace(chat=Chat(), max_tokens=9)).read
    for document, tokens in (
        (talk, [1, 0]),
        ({"messages": talk, "tools": [{"type": "function"}]}, [1, 1]),
    ):
        path.write_text(json.dumps(document))
        assert read(path) == tokens


def test_bad_prompts_are_refused(explain: Explain, tmp_path: Path, model_folder: Path) -> None:
    """What is no prompt, or no store, ends with a message that names it."""
    for content, says in (
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b'[1, "a"]', "neither token ids nor messages"),
        (b"[]", "bad.json is empty: it holds no tokens"),
        (json.dumps([1] * 2049).encode(), "has 2049 tokens, more than the model's context of 2048"),
    ):
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        command = ["explain", str(path), "-f", str(explain.store), "--model", str(model_folder)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert says in " ".join(result.output.split())
    (tmp_path / "empty").mkdir()
    path.write_text("[1, 2]")
    command = ["explain", str(path), "-f", str(tmp_path / "empty"), "--model", str(model_folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "empty: nothing was ever stored there" in " ".join(result.output.split())
    assert not [*(tmp_path / "empty").iterdir()]  # looking makes no store
    missing = CliRunner().invoke(app, ["explain", str(path), "-f", str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "is not a folder" in " ".join(missing.output.split())

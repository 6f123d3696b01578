"""The demo, the quickstart and the agent's picture as people run them, on a tiny random model with
real files."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.cli.demo_run import Demo

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result

_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_EXAMPLES = Path(__file__).parents[2] / "examples"
_QUICKSTART = _EXAMPLES / "quickstart.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers with a tokenizer of one token a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def demo(model: Path, tmp_path: Path, *arguments: str) -> Result:
    fixed = ("--model", str(model), "--output", str(tmp_path / "out"), "--threads", "1")
    return CliRunner().invoke(app, ["demo", *fixed, *arguments])


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one whole demo says about itself."""
    result = demo(
        model, tmp_path_factory.mktemp("demo"), "--tokens", "2048", "--links", "raw,1:1", "--json"
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_three_ways_over_each_link(told: dict[str, Any]) -> None:
    """Each link shows recompute only, load only and both ends, in that order."""
    ways = [(row["link"], row["way"]) for row in told["rows"]]
    assert ways == [
        (link, way) for link in ("raw", "1:1") for way in ("recompute", "load", "adaptive")
    ]


def test_single_ways_are_single(told: dict[str, Any]) -> None:
    """Recompute only loads nothing, load only recomputes nothing, and nothing fails."""
    shares = {(row["link"], row["way"]): row["recomputed_share"] for row in told["rows"]}
    for link in ("raw", "1:1"):
        assert shares[link, "recompute"] == 1.0
        assert shares[link, "load"] == 0.0
    assert not any(row["failed_loads"] for row in told["rows"])


def test_every_answer_is_the_one_that_never_forgot(told: dict[str, Any]) -> None:
    """Tokens and canonical bytes are compared, and every cell is one of the two exact ones."""
    assert told["identical"]
    for row in told["rows"]:
        assert row["tokens_identical"]
        assert row["canonical_identical"]
        assert row["exact_cells"] == row["cells"] == 2048 // 256 * 3
    assert told["canonical_chunks"] > 0


def test_link_speed_follows_from_this_run(told: dict[str, Any]) -> None:
    """At 1:1 the link's bandwidth is the prefix's bytes over its measured recompute time."""
    rows = {(row["link"], row["way"]): row for row in told["rows"]}
    seconds = rows["1:1", "recompute"]["restored"]
    assert rows["1:1", "load"]["bandwidth"] == pytest.approx(told["prefix_bytes"] / seconds)
    assert rows["1:1", "load"]["restored"] >= 0.95 * seconds
    assert rows["1:1", "adaptive"]["efficiency"] > 0


def test_timeline_is_a_chrome_trace_and_a_picture(told: dict[str, Any]) -> None:
    """The trace has a lane for compute and one for the link; the picture is a PNG."""
    trace, picture = map(Path, told["files"])
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "load link"} <= lanes
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_table_and_answer_for_people(model: Path, tmp_path: Path) -> None:
    """Without --json: progress, a table, the answer, the verdict, and a store that can be kept."""
    store = tmp_path / "store"
    result = demo(model, tmp_path, "--tokens", "1024", "--links", "raw", "--store", str(store))
    assert result.exit_code == 0, result.output
    for words in ("turn 1", "recompute", "CacheFlow", "assistant: ", "tokens identical: yes"):
        assert words in result.output
    assert (store / "cacheflow-store.json").is_file()


def test_a_different_answer_is_said_and_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had an answer differed, the demo would say NO and exit with 1."""

    async def differs(*_: Any) -> bool:
        return False

    monkeypatch.setattr(Demo, "stream", differs)
    result = demo(model, tmp_path, "--tokens", "512", "--links", "raw")
    assert result.exit_code == 1
    assert "tokens identical: NO" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "511"], "at least 512"),
        (["--tokens", "8000"], "has room for"),
        (["--links", "1:0"], "--links"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_options_end_before_work(
    model: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    """A setting that cannot be used is one line that names it, and exit code 2."""
    result = demo(model, tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_folder_that_is_not_a_store_is_left_alone(model: Path, tmp_path: Path) -> None:
    """--store on a folder with other files is refused and nothing in it is touched."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("dear reader")
    result = demo(model, tmp_path, "--tokens", "512", "--store", str(mine))
    assert result.exit_code == 2, result.output
    assert [p.name for p in mine.iterdir()] == ["letter.txt"]


def test_quickstart_restores_what_it_forgot(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart stays under 40 lines, and gives the same answer again after forgetting."""
    assert len(_QUICKSTART.read_text().splitlines()) < 40
    monkeypatch.setattr("cacheflow.plugins.transformers.prepare_smollm2", lambda: model)
    runpy.run_path(str(_QUICKSTART), run_name="__main__")
    first, resumed = capsys.readouterr().out.split("\nresumed: ")
    answer = first.split("first time: ")[1].splitlines()[0]
    assert answer
    assert resumed.splitlines()[0] == answer
    assert " 0 of them stored:\n  0 loaded, 0 recomputed, " in first
    parts = re.search(
        r"(\d+) tokens, (\d+) of .*\n  (\d+) loaded, (\d+) recomputed, (\d+) new", resumed
    )
    assert parts is not None
    prompt, stored, loaded, recomputed, new = map(int, parts.groups())
    assert loaded + recomputed == stored == prompt - new
    assert " 0 of them stored" not in resumed


def test_agent_picture_compares_four_servers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three turns of an agent on each server: the same answers, and a picture of the TTFTs."""
    picture = tmp_path / "ttft.png"
    monkeypatch.setenv("TURNS", "3")
    monkeypatch.setenv("PICTURE", str(picture))
    monkeypatch.setattr("cacheflow.plugins.transformers.prepare_smollm2", lambda: model)
    results = runpy.run_path(str(_EXAMPLES / "agent_ttft.py"))["results"]
    assert [len(ttft) for ttft, _ in results.values()] == [3] * 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "the answers of all are the same" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")  # LangGraph's own
def test_graph_branches_are_forks(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of three branches from a checkpoint has a session of its own, and finds everything that
    they begin with in memory."""
    monkeypatch.setattr("cacheflow.plugins.transformers.prepare_smollm2", lambda: model)
    monkeypatch.syspath_prepend(str(_EXAMPLES / "frameworks"))
    runpy.run_path(str(_EXAMPLES / "frameworks" / "langgraph_forks.py"), run_name="__main__")
    said = capsys.readouterr().out
    turns = re.findall(r"([\w-]+): (\d+) prompt tokens, (\d+) of them cached", said)
    (trunk, prompt, cached), *branches = turns
    assert (trunk, cached) == ("trunk", "0")
    assert len({name for name, *_ in branches} - {trunk}) == 3
    assert all(int(each) >= int(prompt) for _, _, each in branches)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 2), (6, 3), (16, 8)])
def test_threads_default(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to two compute threads on small machines, else never more than half the cores."""
    from cacheflow.cli.demo import _threads

    monkeypatch.setattr("cacheflow.cli.demo.usable_cores", lambda: cores)
    assert _threads() == threads


def test_without_model_the_trained_one_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No --model: the small trained model is made ready in the cache folder of the settings."""
    asked: list[Path] = []

    def prepare(cache_dir: Path, progress: Callable[[str, float], None]) -> Path:
        asked.append(cache_dir)
        progress("converting", 0.5)
        return model

    monkeypatch.setattr("cacheflow.plugins.transformers.engine.prepare_smollm2", prepare)
    monkeypatch.setenv("CACHEFLOW_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["demo", "--tokens", "512", "--links", "raw", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asked == [tmp_path / "cache"]

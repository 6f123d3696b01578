"""`cacheflow simulate`: figures, JSON, report, and errors a person can act on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.simulation.traces import generate_trace

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

FEW = ["--requests", "6", "--policy", "load,adaptive", "--lengths", "uniform:1k:8k"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_same_seed_same_output() -> None:
    """`--json` prints one document, byte for byte the same for the same seed."""
    first, again, other = (simulate(*FEW, "--json", "--seed", seed) for seed in ("1", "1", "2"))
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout != other.stdout
    found = json.loads(first.stdout)
    assert [each["policy"] for each in found["policies"]] == ["load", "adaptive"]
    assert found["policies"][0]["ttft"]["p99"] > 0
    assert found["settings"]["preset"] == "h100:llama-3.1-8b"


def test_a_table_for_people() -> None:
    """Without `--json` there is a row a policy, and it fits 80 columns. P99 of a few requests is
    one of them, and says little of a policy."""
    result = simulate(*FEW, "--load", "0")
    assert result.exit_code == 0, result.output
    assert "adaptive" in result.stdout
    assert "all at once" in result.stdout
    assert "…" not in result.stdout
    assert "prefixes: rounded to chunks of 512 tokens" in result.stdout
    assert "compare several --seed" in result.stdout


@pytest.mark.parametrize(
    "more",
    [
        ["--gpus", "2", "--uplink", "40gbps", "--router", "round-robin"],
        ["--link", "dram@0.5,25gbps", "--cells", "512x1", "--preset", "a100:qwen3-8b"],
        ["--cells", "exact", "--chunk", "256", "--objective", "mean", "--cold"],
        ["--failing", "0.2", "--decode-share", "0.3", "--coverage", "0.8", "--holes", "0.1"],
        ["--agents", "3", "--turns", "3", "--router", "affinity", "--link", "pcie5,10gbps"],
    ],
)
def test_settings_are_taken(more: list[str]) -> None:
    """Each kind of hardware, workload and trouble runs to its end."""
    result = simulate(*FEW, "--json", *more)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"][1]["requests"] >= 6


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_a_report_is_written(tmp_path: Path) -> None:
    """One file that names its policies; the table says where it is."""
    path = tmp_path / "out.html"
    result = simulate(*FEW, "--report", str(path), "--requests", "3")
    assert result.exit_code == 0, result.output
    page = path.read_text(encoding="utf-8")
    assert "Both pointers: adaptive" in page
    assert "each policy wins" in page
    assert "out.html" in result.stdout.replace("\n", "")


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    """As many of its requests as asked for."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(generate_trace(30)))
    result = simulate("--trace", str(path), "--requests", "20", "--policy", "adaptive", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"][0]["requests"] == 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "gtx:llama"], "--preset"),
        (["--link", "fast"], "--link"),
        (["--uplink", "nan"], "--uplink 'nan'"),
        (["--gpus", "100000000"], "--gpus"),
        (["--link", "nvme@2"], "--link 'nvme@2'"),
        (["--link", "nvme,nvme"], "each link once"),
        (["--policy", "magic"], "magic"),
        (["--policy", ","], "--policy"),
        (["--objective", "fame"], "fame"),
        (["--router", "dice"], "--router"),
        (["--cells", "2048"], "--cells"),
        (["--cells", "2048x5"], "--cells"),
        (["--cells", "700x4"], "--cells holds whole chunks (grid 700* is not a multiple of 512"),
        (["--lengths", "long"], "number of tokens"),
        (["--load", "-1"], "--load -1 must be 0 (all at once) or more"),
        (["--coverage", "2"], "error: --coverage 2 must be between 0 and 1"),
        (["--holes", "-1"], "error: --holes -1 must be between 0 and 1"),
        (["--decode-share", "1"], "error: --decode-share 1 must be from 0 to below 1"),
        (["--chunk", "300"], "error: --chunk 300: a tile of --cells holds whole chunks"),
        (["--trace", "/nowhere/t.jsonl"], "/nowhere/t.jsonl"),
        (["--trace", "x", "--agents", "2"], "exclude"),
        (["--failing", "1"], "error: --failing 1 must be"),
        (["--report", "/nowhere/at/all.html"], "--report"),
        (["--report", "/"], "that is a folder"),
    ],
)
def test_errors_are_one_line(arguments: list[str], says: str) -> None:
    """What was wrong is named with its option; exit code 2, no traceback."""
    result = simulate(*FEW, *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_nothing_heavy_is_imported() -> None:
    """Importing the simulation loads neither torch nor asyncio into the process."""
    code = (
        "import sys, cacheflow.simulation.report, cacheflow.simulation.maps\n"
        "print([n for n in ('torch', 'asyncio', 'uvloop', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_shows_each_option() -> None:
    """`--help` lists what can be set."""
    text = simulate("--help").output
    for option in ("--preset", "--link", "--gpus", "--trace", "--objective", "--report", "--seed"):
        assert option in text

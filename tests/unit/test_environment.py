"""Environment variables that nobody reads are told, those that somebody reads are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cacheflow.environment import PREFIX, unread
from cacheflow.errors import ConfigError
from cacheflow.plugins.openai_server import ServerSettings
from cacheflow.plugins.vllm.settings import VllmSettings
from cacheflow.pool import StoreSettings
from cacheflow.settings import Settings, default_cache_dir

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("CACHEFLOW_TEIRS", ["CACHEFLOW_TIERS"]),
        ("CACHEFLOW_STAGING_BYTE", ["CACHEFLOW_STAGING_BYTES"]),
        ("cacheflow_polcy", ["CACHEFLOW_POLICY"]),
        ("CACHEFLOW_SERVE_PORT", ["CACHEFLOW_SERVER_PORT"]),
        ("CACHEFLOW_HOME", []),
    ],
)
def test_the_nearest_name_is_found(variable: str, meant: list[str]) -> None:
    """By what comes behind the prefix, in any case of letters."""
    assert unread({variable: "x"}, PREFIX, Settings.model_fields) == {variable: meant}


def test_parts_look_after_their_own_names() -> None:
    """The server's and the store's settings name theirs, and only theirs."""
    wrong = {"CACHEFLOW_SERVER_PROT": "1", "CACHEFLOW_STORE_AREAN": "1", "CACHEFLOW_TEIRS": "1"}
    assert unread(wrong, "CACHEFLOW_SERVER_", ServerSettings.model_fields) == {
        "CACHEFLOW_SERVER_PROT": ["CACHEFLOW_SERVER_PORT"]
    }
    assert unread(wrong, "CACHEFLOW_STORE_", StoreSettings.model_fields) == {
        "CACHEFLOW_STORE_AREAN": ["CACHEFLOW_STORE_ARENA"]
    }
    assert list(unread(wrong, PREFIX, Settings.model_fields)) == ["CACHEFLOW_TEIRS"]


def test_every_name_in_the_project_is_known() -> None:
    """Whatever code, documents and manifests tell people to set is told to nobody as a mistake."""
    pattern = re.compile(r"\bCACHEFLOW_[A-Z_]*[A-Z]\b(?!_|[*])")
    kinds = ("*.py", "*.md", "*.yml", "*.sh", "Makefile")
    folders = ("cacheflow", "plugins", "storage_backends", "benchmarks", "docs", "deploy")
    paths = [
        p for name in (*folders, "examples") for kind in kinds for p in (ROOT / name).rglob(kind)
    ]
    names = {name for p in [*paths, *ROOT.glob("*.md")] for name in pattern.findall(p.read_text())}
    variables = dict.fromkeys(names, "1")
    assert {"CACHEFLOW_TIERS", "CACHEFLOW_POOL_TOKEN", "CACHEFLOW_STORE_ARENA"} <= names
    assert unread(variables, PREFIX, Settings.model_fields) == {}
    assert unread(variables, "CACHEFLOW_SERVER_", ServerSettings.model_fields) == {}
    assert unread(variables, "CACHEFLOW_STORE_", StoreSettings.model_fields) == {}
    of_vllm = {f"CACHEFLOW_{name.upper()}": "1" for name in VllmSettings.model_fields}
    assert unread(of_vllm, PREFIX, Settings.model_fields) == {}


def test_what_kubernetes_sets_is_nobodys_mistake() -> None:
    """A service called cacheflow-pool sets such variables in every pod beside it; a port that a
    person sets is told."""
    links = {
        "CACHEFLOW_POOL_SERVICE_HOST": "10.0.0.7",
        "CACHEFLOW_POOL_SERVICE_PORT": "7411",
        "CACHEFLOW_POOL_SERVICE_PORT_DATA": "7412",
        "CACHEFLOW_POOL_PORT": "tcp://10.0.0.7:7411",
        "CACHEFLOW_POOL_PORT_7411_TCP": "tcp://10.0.0.7:7411",
        "CACHEFLOW_POOL_PORT_7411_TCP_ADDR": "10.0.0.7",
    }
    assert unread(links, PREFIX, Settings.model_fields) == {}
    assert unread({"CACHEFLOW_POOL_PORT": "7411"}, PREFIX, Settings.model_fields)


@pytest.mark.parametrize(
    "program",
    [
        ["-c", "from cacheflow import Settings; Settings(), Settings()"],
        ["-c", "from cacheflow.cli import main; main()", "store", "--help"],
    ],
)
def test_a_program_tells_once(program: list[str]) -> None:
    """On standard error, from the settings or from the command, and goes on."""
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "CACHEFLOW_TEIRS": "[]"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = "environment variable CACHEFLOW_TEIRS is read by nobody: did you mean CACHEFLOW_TIERS?"
    assert done.stderr.count(told) == 1


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and manifests pass on what is not set as an empty text: a folder that is called
    so would be the one that the process happens to be in."""
    for name in ("CACHE_DIR", "TIERS", "STAGING_BYTES", "STORE_SPILL", "STORE_ARENA"):
        monkeypatch.setenv(PREFIX + name, "")
    monkeypatch.setenv("CACHEFLOW_SERVER_API_KEYS", "")
    assert Settings() == Settings(cache_dir=default_cache_dir(), tiers=(), staging_bytes=256 << 20)
    assert StoreSettings().spill is None
    assert ServerSettings().api_keys == ()


@pytest.mark.parametrize(
    ("variable", "settings"),
    [
        ("CACHEFLOW_TIERS", Settings),
        ("CACHEFLOW_SERVER_API_KEYS", ServerSettings),
        ("CACHEFLOW_STORE_TRANSPORTS", StoreSettings),
    ],
)
def test_a_list_that_is_no_json_is_named(
    variable: str, settings: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its variable; what is in it may be secret."""
    monkeypatch.setenv(variable, "s3cret")
    with pytest.raises(ConfigError, match=f"{variable} is not JSON, which lists are") as caught:
        settings()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("size", ["nan", "-1", "lots", "5 parsecs"])
@pytest.mark.parametrize(
    ("variable", "settings"),
    [("CACHEFLOW_STAGING_BYTES", Settings), ("CACHEFLOW_STORE_ARENA", StoreSettings)],
)
def test_sizes_say_how_they_are_written(
    variable: str, settings: type[Settings], size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands there."""
    monkeypatch.setenv(variable, size)
    with pytest.raises(ConfigError, match="write it in bytes, as 268435456 or 256MiB"):
        settings()

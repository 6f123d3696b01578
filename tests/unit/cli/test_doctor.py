"""`cacheflow doctor`: it finds what works, says what to fix, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app, checks, rates
from cacheflow.cli.doctor import show


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure for an instant only: the figures themselves are not under test."""
    monkeypatch.setattr(checks, "copy_rate", lambda: rates.copy_rate(0.001))
    monkeypatch.setattr(checks, "hash_rate", lambda: rates.hash_rate(0.001))

    def disk(folder: Path, *, direct: bool, nbytes: int) -> rates.DiskRates:
        return rates.disk_rates(folder, direct=direct, nbytes=min(nbytes, 8 << 20))

    monkeypatch.setattr(checks, "disk_rates", disk)


def doctor(folder: Path, code: int = 0) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json", "--folder", str(folder)])
    assert result.exit_code == code, result.output
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_everything_that_is_promised_is_checked(tmp_path: Path) -> None:
    """Python, torch, CUDA, CPU, uvloop, each backend and engine, memory and disk are checked."""
    found = doctor(tmp_path)
    for name in ("python", "torch", "cuda", "cpu", "uvloop", "memory copy", "xxh3"):
        assert name in found
    for name in ("backend dram", "backend nvme", "backend throttled", "engine transformers"):
        assert found[name]["verdict"] == "ok", found[name]
    for name in ("read", "write"):
        assert found[f"disk {tmp_path} {name}"]["figures"]["bytes_per_second"] > 0
    assert found[f"disk {tmp_path} O_DIRECT"]["verdict"] in ("ok", "note")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """The scratch file is gone afterwards."""
    doctor(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_table_for_people(tmp_path: Path) -> None:
    """Without `--json` it is a table with what to do beside each finding."""
    result = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)])
    assert result.exit_code == 0
    assert "what to do" in result.stdout


def test_advice_keeps_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in advice (`pip install 'cacheflow-kv[demo]'`) are printed as they are."""
    show([checks.Check("it", checks.Verdict.NOTE, "[red]", "install 'x[demo]'")])
    output = capsys.readouterr().out
    assert "[red]" in output
    assert "x[demo]" in output


def test_missing_folder_fails(tmp_path: Path) -> None:
    """A folder that is not there is a failed check with a fix, and exit code 1."""
    found = doctor(tmp_path / "nowhere", code=1)
    check = found[f"disk {tmp_path / 'nowhere'}"]
    assert check["verdict"] == "fail"
    assert "mkdir" in check["fix"]


def test_unwritable_folder_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written is a failed check that says so."""

    def refuse(folder: Path) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checks, "supports_direct", refuse)
    check = doctor(tmp_path, code=1)[f"disk {tmp_path}"]
    assert check["verdict"] == "fail"
    assert "Read-only" in check["found"]


def test_backend_that_cannot_be_imported_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registered backend whose package is missing is reported with what to install."""
    point = EntryPoint("cloud", "no_such_package:Backend", "cacheflow.storage_backends")
    for module in ("cacheflow.registry", "cacheflow.cli.checks"):
        monkeypatch.setattr(f"{module}.available", lambda group="": {"cloud": point})
    check = doctor(tmp_path)["backend cloud"]
    assert check["verdict"] == "note"
    assert "no_such_package" in check["fix"]


def test_object_store_without_its_extra_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without obstore the object store is reported with the line that installs it."""
    for name in list(sys.modules):
        if name.startswith("cacheflow.storage_backends.object_store"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    check = doctor(tmp_path)["backend object-store"]
    assert check["verdict"] == "note"
    assert "pip install 'cacheflow-kv[object-store]'" in check["fix"]


def test_transports_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no RDMA, or no NIXL, that is a note with what to do; tcp works everywhere."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr("cacheflow.storage_backends.nixl.agent._RDMA_DEVICES", tmp_path / "none")
    found = doctor(tmp_path)
    assert found["transport tcp"]["verdict"] == "ok"
    assert found["transport nixl"]["verdict"] == "note"
    for name in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.setitem(sys.modules, name, None)
    check = doctor(tmp_path)["transport nixl"]
    assert check["verdict"] == "note"
    assert "pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1 numpy" in check["fix"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_file_system_without_direct_io_works() -> None:
    """Where O_DIRECT is refused the rates are measured through the page cache."""
    shm = Path("/dev/shm")
    direct = rates.supports_direct(shm)
    assert rates.disk_rates(shm, direct=direct, nbytes=4 << 20).read > 0


def test_fast_bf16_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice on bf16 follows the processor's flags."""
    monkeypatch.setattr(checks, "_cpu_flags", lambda: {"fpu", "avx2"})
    assert checks._cpu()[0].verdict is checks.Verdict.NOTE
    monkeypatch.setattr(checks, "_cpu_flags", lambda: {"fpu", "amx_bf16"})
    assert checks._cpu()[0].verdict is checks.Verdict.OK

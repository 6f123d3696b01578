"""The example of a third-party backend: it installs, is found, and passes its own test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend"


def test_the_example_passes_the_conformance_suite(tmp_path: Path) -> None:
    """Installed from its folder as a user would, the example's test file passes on a real server,
    and CacheFlow finds the backend by its entry point."""
    if not (shutil.which("valkey-server") or shutil.which("redis-server")):
        pytest.skip("no server: apt-get install redis-server, or valkey-server")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, source)
    output = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "-rs", "test_valkey.py"),
        cwd=source,
        PYTHONPATH=str(site),
    )
    assert "passed" in output
    skips = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    assert all("capability: this store does not lend" in line for line in skips), skips


def run(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

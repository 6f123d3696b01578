"""``cacheflow serve`` as a process of its own, for what only a real server shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Served", "served", "until_true"]


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def until_true(true: Callable[[], object], seconds: float = 60) -> None:
    """Ask again and again: another process cannot call us back."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@contextmanager
def served(model: Path, folder: Path, **settings: str) -> Iterator[Served]:
    """A server of ``model`` with its store in ``folder``; killed if it has not ended itself."""
    command = [sys.executable, "-c", "from cacheflow.cli import main; main()", "serve"]
    command += ["--model", str(model), "--store", str(folder / "kv"), "--port", "0"]
    command += ["--dtype", "float32", "--device", "cpu", "--kv-bytes", "64MiB"]
    given = {f"CACHEFLOW_SERVER_{name.upper()}": value for name, value in settings.items()}
    environment = {**os.environ, "CACHEFLOW_STAGING_BYTES": "64MiB", **given}
    log = folder / f"log-{time.monotonic_ns()}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        address = re.compile(r"running on (http://[\d.:]+)")

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            return address.search(log.read_text()) is not None

        until_true(listens, 240)  # it imports torch: minutes on a machine with much to do
        found = address.search(log.read_text())
        assert found is not None
        yield Served(found[1], process, log)
    finally:
        process.kill()
        process.wait()

"""Processes that stand still, for fault tests."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.testing.freezing import freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Iterator

BUSY = """
import threading, time
def run():
    while True:
        time.sleep(0)
print("up", flush=True)
for _ in range(3):
    threading.Thread(target=run, daemon=True).start()
run()
"""


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Four threads that never rest."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_frozen_process_has_stopped() -> None:
    """On return the kernel has nothing to report but that it is stopped, time and again."""
    with busy_process() as process:
        for _ in range(20):
            freeze(process.pid)
            how = os.WSTOPPED | os.WNOHANG  # "stopped" is reported once, when the last thread has
            assert os.waitid(os.P_PID, process.pid, how) is not None
            thaw(process.pid)
        freeze(process.pid)
        freeze(process.pid)  # once more is no harm


def test_a_process_that_is_gone_cannot_be_frozen() -> None:
    """One that has ended is an error, whether or not its parent has heard of it."""
    with busy_process() as process:
        process.kill()
        with pytest.raises(ProcessLookupError, match="has ended"):
            freeze(process.pid)
        process.wait()
        with pytest.raises(ProcessLookupError):
            freeze(process.pid)

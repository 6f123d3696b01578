"""Processes that stand still: SIGSTOP takes effect some time after it was sent, these wait for it.

Linux only. Blocking: on an event loop, use a thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Final

__all__ = ["freeze", "thaw"]

_SECONDS: Final = 30.0


def freeze(pid: int) -> None:
    """Stop every thread of the process ``pid``, a child or not; its connections stay open.

    Raises:
        ProcessLookupError: it is not there, or ends instead.
        TimeoutError: a thread of it still runs after half a minute.
    """
    os.kill(pid, SIGSTOP)
    end = time.monotonic() + _SECONDS
    while (states := _states(pid)) != {"T"}:
        if not states or states & set("ZX"):
            raise ProcessLookupError(f"process {pid} has ended")
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} does not stop: its threads are in {sorted(states)}")
        time.sleep(0.001)


def thaw(pid: int) -> None:
    """Let it go on."""
    os.kill(pid, SIGCONT)


def _states(pid: int) -> set[str]:
    """In which states its threads are, by the letters of proc(5)."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # that thread ended meanwhile
            continue
        found.add(text.rpartition(")")[2].split()[0])
    return found

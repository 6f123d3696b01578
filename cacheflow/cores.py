"""How many processor cores this process may use, on any system."""

from __future__ import annotations

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Cores that this process may run on, at least 1.

    What Python 3.13 says where there is such a Python, else the scheduler's mask (Linux), else the
    machine's cores: only some systems can bind a process to a few of them.
    """
    counted = getattr(os, "process_cpu_count", os.cpu_count)
    if counted is os.cpu_count and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return counted() or 1

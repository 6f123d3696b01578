"""The cores this process may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cacheflow.cores import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="capability: cannot be bound")
def test_cores_that_the_process_may_not_use_do_not_count() -> None:
    """A process bound to one core has one, however many the machine has."""
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from cacheflow.cores import usable_cores; print(usable_cores())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.split() == [b"1"]


def test_what_python_counts_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.13 on Python knows, and lets people override it."""
    monkeypatch.setattr(os, "process_cpu_count", lambda: 5, raising=False)
    assert usable_cores() == 5


@pytest.mark.parametrize(("machine", "cores"), [(6, 6), (None, 1)])
def test_a_system_without_masks_has_all_its_cores(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, cores: int
) -> None:
    """macOS before Python 3.13: the machine's cores, or 1 where not even they are known."""
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert usable_cores() == cores

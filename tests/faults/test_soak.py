"""A few seconds of ``make bench-soak``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bench_soak as bench
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.allow_blocking  # the workers look at the process's own memory and files
async def test_a_mixed_load_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Memory, open files and staging flat; nothing uncounted, nothing over the caps."""
    found = await bench.soak(5_000, tmp_path)
    assert found["wrong"] == []
    assert found["evicted"].keys() == {"dram", "nvme"}
    assert found["given_up"] > 0
    assert found["reads"]["ok"] > 500

"""A few seconds of ``make bench-sessions``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bench_sessions as bench
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.allow_blocking  # the load looks at the process's own memory
async def test_many_sessions_at_once(model_folder: Path) -> None:
    """Turns cancelled and left at random: every token is that of a cold run, nobody waits out of
    proportion, and nothing is left."""
    found = await bench.load(2.0, model_folder, 16, seed=3)
    assert found["wrong"] == []
    assert found["turns"]["whole"] > 10
    assert found["tokens_compared"] > 100
    assert found["max_over_median"] < 20

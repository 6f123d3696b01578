"""Sessions of a real engine over a pool in trouble: a tenth of `make bench-pool-faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_pool_faults import FAULTS, Campaign, wrong

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.allow_blocking  # the bench reads what it likes between two requests
async def test_requests_complete_whatever_becomes_of_the_store(
    model_folder: Path, tmp_path: Path
) -> None:
    """kill -9 and restart, SIGSTOP, cut connections, a black hole: every request completes with the
    tokens of a cold run, no load is corrupt, and each time the same client finds back by itself."""
    engine = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    try:
        phases = await Campaign(engine, tmp_path, restores=24, tokens=405).run()
    finally:
        await engine.aclose()
    assert [phase.fault for phase in phases] == list(FAULTS)
    assert wrong(phases) == []
    assert all(phase.longest_s < 15.0 for phase in phases)

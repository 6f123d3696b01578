"""A tenth of ``make bench-faults``, on a tiny model: every fault and every medium comes up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import bench_faults as bench
import pytest
from fault_cells import MEDIA, SETUPS, Limits, Stage

from cacheflow.costs import ComputeModel
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from pathlib import Path

EVERY: Final = 10
LIMITS: Final = Limits(ratio=1.10, seconds=0.5)
"""Requests of milliseconds: half a second says that nobody waits for a deadline."""


@pytest.mark.allow_blocking  # the matrix looks at open files itself
@pytest.mark.parametrize("setup", SETUPS)
async def test_requests_complete_whatever_storage_does(
    model_folder: Path, tmp_path: Path, setup: str
) -> None:
    """Tokens of a cold run, in time, nothing left behind, and a tier that is taken back."""
    engine = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    try:
        chance = random.Random(8)
        tokens = [chance.randrange(320) for _ in range(450)]
        compute = ComputeModel(*engine.layer_flops)
        stage = Stage(engine, tmp_path, tokens[:300], tokens, compute, 20e6, 8 << 20)
        await stage.prepare()
        cells = list(bench.matrix(MEDIA, [setup]))[SETUPS.index(setup) :: EVERY]
        strikes = 0  # in all: beside a good tier the sick one may not even be asked
        for cell in cells:
            seen = (await bench.settle(stage, cell, LIMITS))[-1]
            assert not seen.wrong, cell.name
            assert seen.excess(LIMITS) <= 0.0, cell.name
            strikes += seen.strikes
        assert strikes > 0
    finally:
        await engine.aclose()

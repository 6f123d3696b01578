"""A part of ``make bench-faults``, on a tiny model: every fault and every medium comes up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import bench_faults as bench
import pytest
from fault_cells import FAULTS, MEDIA, SETUPS, Cell, Limits, Stage

from cacheflow.costs import ComputeModel
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.storage_backends.nixl.agent import why_missing
from cacheflow.types import TileGrid
from tests.conftest import FULL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EVERY: Final = 4 if FULL else 13
"""Every so manieth cell is run, in each set-up of tiers from another one on."""
WAYS: Final = [("pool", "all"), ("pool-nixl", "tcp"), ("pool-nixl", "all")]
LIMITS: Final = Limits(ratio=1.10, seconds=0.5)
"""Requests of milliseconds: half a second says that nobody waits for a deadline."""


def picked(setup: str) -> list[Cell]:
    return list(bench.matrix(MEDIA, [setup]))[SETUPS.index(setup) :: EVERY]


def test_every_fault_and_every_medium_is_among_the_cells() -> None:
    """And every operation that faults come to."""
    cells = [cell for setup in SETUPS for cell in picked(setup)]
    assert {cell.fault.kind for cell in cells} == {fault.kind for fault in FAULTS}
    assert {cell.fault.operation for cell in cells} == {fault.operation for fault in FAULTS}
    assert {cell.medium for cell in cells} == set(MEDIA)


@pytest.mark.allow_blocking  # the matrix looks at open files itself
@pytest.mark.parametrize("setup", SETUPS)
async def test_requests_complete_whatever_storage_does(
    model_folder: Path, tmp_path: Path, setup: str
) -> None:
    """Tokens of a cold run, in time, nothing left behind, and a tier that is taken back."""
    await run_cells(picked(setup), model_folder, tmp_path)


@pytest.mark.allow_blocking  # the matrix looks at open files itself
@pytest.mark.parametrize(("medium", "ucx"), WAYS)
async def test_requests_complete_whatever_a_pool_does(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, medium: str, ucx: str
) -> None:
    """The same of a store in another process: over tcp, and over NIXL, where UCX may use sockets
    only, and where it takes what it likes best."""
    if medium == "pool-nixl" and (reason := why_missing()) is not None:
        pytest.skip(f"no NIXL here: {reason}")
    monkeypatch.setenv("UCX_TLS", ucx)
    cells = list(bench.matrix([medium], SETUPS))[WAYS.index((medium, ucx)) :: 2 * EVERY]
    await run_cells(cells, model_folder, tmp_path)


async def run_cells(cells: Sequence[Cell], model_folder: Path, tmp_path: Path) -> None:
    engine = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    chance = random.Random(8)
    tokens = [chance.randrange(320) for _ in range(450)]
    compute = ComputeModel(*engine.layer_flops)
    media = sorted({cell.medium for cell in cells} | {"dram"})
    stage = Stage(engine, tmp_path, tokens[:300], tokens, compute, 20e6, 8 << 20, media)
    try:
        await stage.prepare()
        strikes = 0  # in all: beside a good tier the sick one may not even be asked
        for cell in cells:
            seen = bench.verdict(await bench.settle(stage, cell, LIMITS))
            assert not seen.wrong, cell.name
            assert seen.excess(LIMITS) <= 0.0, cell.name
            strikes += seen.strikes
        assert strikes > 0
    finally:
        await stage.aclose()
        await engine.aclose()

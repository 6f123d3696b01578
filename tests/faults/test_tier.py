"""Cancelling anything at any await of a tier leaves nothing behind, and its index stays true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from cacheflow.clock import ManualClock
from cacheflow.memory import InFlight
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.testing.storage_harness import idle, load_all, step_and_cancel
from cacheflow.tiers.tier import Tier
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.abc import StorageBackend

SIZE: Final = make_object(0).info.nbytes
STEPS: Final = (*range(10), 14, 20, 40, 100)


@pytest.fixture(params=["dram", "nvme"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
    if request.param == "dram":
        return await DramBackend.open({"capacity_bytes": 1 << 20})
    return await NvmeBackend.open({"path": str(tmp_path / "store"), "fsync": False})


async def test_cancelling_anywhere(backend: StorageBackend) -> None:
    """A store that has to evict, a load, a lookup and a delete, each cancelled at every await: no
    hold, lease, budget or reserved byte is left, the capacity holds, and after settling the index
    has to the byte what the backend has."""
    clock = ManualClock()
    settings = TierSettings(name="t", backend="x")
    settings = settings.model_copy(update={"capacity_bytes": 6 * SIZE, "load_operations": 2})
    tier = await Tier.over(backend, settings, clock=clock)
    hold = InFlight()
    number = 0
    for steps in STEPS:
        for make in (_store, _load, _look_up, _delete):
            number += 3
            await step_and_cancel(make(tier, number, hold), steps)
            clock.advance(100.0)
        await idle(hold)
        await tier.settle()
        catalogue = tier.catalogue
        catalogue.tick(clock.now())
        assert catalogue.used == catalogue.bytes == await backend.used_bytes() <= 6 * SIZE
        assert {e.key for e in catalogue} == {info.key async for info in backend.scan()}
        assert catalogue.holds.nbytes() == 0
        assert tier._loads.under_way == tier._stores.under_way == (0, 0)
        assert tier._loads.waiting == tier._stores.waiting == 0
    results = await tier.store([make_object(n).write() for n in range(6)])
    assert {result.status for result in results} == {TransferStatus.OK}
    await tier.aclose()


def _store(tier: Tier, number: int, hold: InFlight) -> Any:
    return tier.store([make_object(number + n).write(hold=hold) for n in range(3)])


def _load(tier: Tier, number: int, hold: InFlight) -> Any:
    keys = [make_object(number - 3 + n).key for n in range(3)]
    return load_all(tier, [Read(key, 0, aligned_buffer(SIZE, hold)) for key in keys])


def _look_up(tier: Tier, number: int, hold: InFlight) -> Any:
    return tier.lookup([make_object(number - 6 + n).key.chunk for n in range(3)])


def _delete(tier: Tier, number: int, hold: InFlight) -> Any:
    return tier.delete([make_object(number - 9 + n).key for n in range(3)])

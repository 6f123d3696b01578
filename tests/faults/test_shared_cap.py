"""Two engines' tiers on one folder with one cap: they evict for each other and keep to it."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from cacheflow.clock import ManualClock
from cacheflow.settings import TierSettings
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import load_one, make_object
from cacheflow.tiers.tier import Tier
from cacheflow.types import TransferStatus

if TYPE_CHECKING:
    from pathlib import Path

SIZE: Final = make_object(0).info.nbytes
CAP: Final = 8 * SIZE
SETTINGS: Final = TierSettings(name="disk", backend="nvme")


def bytes_in(folder: Path) -> int:
    files = [*(folder / "objects").rglob("*"), *(folder / "tmp").iterdir()]
    return sum(path.stat().st_size for path in files if path.is_file())


async def open_tier(folder: Path, clock: ManualClock) -> Tier:
    options = {"path": str(folder), "max_bytes": CAP, "fsync": False}
    return await Tier.over(await NvmeBackend.open(options), SETTINGS, clock=clock)


async def test_one_makes_room_in_what_the_other_filled(tmp_path: Path) -> None:
    """A tier that finds the folder filled by another one evicts the other's objects, and what
    either has listed is what is there."""
    clock = ManualClock()
    one, two = await open_tier(tmp_path, clock), await open_tier(tmp_path, clock)
    await two.settle()  # its index is that of an empty folder
    for number in range(8):
        [result] = await one.store([make_object(number).write()])
        assert result.status is TransferStatus.OK
    clock.advance(100.0)
    for number in range(8, 12):
        [result] = await two.store([make_object(number).write()])
        assert result.status is TransferStatus.OK
    assert bytes_in(tmp_path) == await one.used_bytes() == await two.used_bytes() == CAP
    chunks = [make_object(number).key.chunk for number in range(12)]
    found = [await tier.lookup(chunks) for tier in (one, two)]
    assert found[0] == found[1]
    assert sum(map(len, found[0])) == 8
    assert all(found[0][8:])
    for tier in (one, two):
        await tier.aclose()


async def test_both_at_once(tmp_path: Path) -> None:
    """Storing and loading from both at the same time ends, keeps the cap, serves only what was
    stored, and leaves the accounts and the files the same."""
    clock = ManualClock()
    tiers = [await open_tier(tmp_path, clock) for _ in range(2)]
    outcomes: list[TransferStatus] = []

    async def work(tier: Tier, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            stored = make_object(chance.randrange(40))
            if chance.random() < 0.6:
                [result] = await tier.store([stored.write()])
                outcomes.append(result.status)
            elif any(await tier.lookup([stored.key.chunk])):
                result, data = await load_one(tier, stored.key, 0, SIZE)
                assert result.status is TransferStatus.MISSING or data == stored.data
            clock.advance(100.0)  # leases of lookups are over

    async with asyncio.TaskGroup() as group:
        for seed in range(6):
            group.create_task(work(tiers[seed % 2], seed))
    assert set(outcomes) <= {TransferStatus.OK, TransferStatus.FULL}
    assert outcomes.count(TransferStatus.OK) > len(outcomes) // 2
    used = [await tier.used_bytes() for tier in tiers]
    assert used[0] == used[1] == bytes_in(tmp_path) <= CAP
    chunks = [make_object(number).key.chunk for number in range(40)]
    found = [await tier.lookup(chunks) for tier in tiers]
    assert found[0] == found[1]
    assert sum(info.nbytes for infos in found[0] for info in infos) == used[0]
    for tier in tiers:
        await tier.aclose()

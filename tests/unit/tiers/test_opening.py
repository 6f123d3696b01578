"""Tiers are opened by name; what was opened for a flow that is not opened after all is closed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.errors import ClosedError, ConfigError
from cacheflow.kv import Stamp
from cacheflow.settings import Settings
from cacheflow.tiers import opening
from cacheflow.tiers.departures import departures_path
from cacheflow.tiers.value import FLAT
from tests.cancelling import Held, cancelled_during

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_store_that_is_opened_for_nobody_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled between a backend and what stands in front of it."""
    backends: list[Any] = []
    held, opened = Held(departures_path), opening._open

    async def open_one(tier: Any) -> Any:
        backends.append(await opened(tier))
        return backends[0]

    monkeypatch.setattr(opening, "_open", open_one)
    monkeypatch.setattr(opening, "departures_path", held)
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(tmp_path / "store")}}
    settings = Settings(tiers=[tier], cache_dir=tmp_path, keep_departures=True)

    async def open_all() -> None:
        async with AsyncExitStack() as stack:
            stamp, clock = Stamp(), SystemClock()
            await opening.open_tiers(settings, stack, FLAT, stamp, clock, lambda event: None)

    await cancelled_during(open_all(), held)
    with pytest.raises(ClosedError):
        await backends[0].used_bytes()


async def test_a_tier_that_cannot_be_opened_is_named() -> None:
    """Of several with one backend it is told which."""
    for backend, why in (("nvme", "storage backend 'nvme', option 'path'"), ("nmve", "no storage")):
        tiers = [
            {"name": "memory", "backend": "dram", "options": {"capacity_bytes": 1 << 20}},
            {"name": "second", "backend": backend},
        ]
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match=f"^tier 'second': {why}"):
                await opening.open_tiers(
                    Settings(tiers=tiers), stack, FLAT, Stamp(), SystemClock(), lambda event: None
                )

"""What would fill a log is told now and then, and nothing of it is lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cacheflow.clock import ManualClock
from cacheflow.errors import CapacityError
from cacheflow.seldom import Seldom
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TransferResult, TransferStatus
from tests.unit.restore.saving import CHUNKS, rig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from cacheflow.types import Write


def test_the_first_is_told_and_then_what_came_in_a_minute() -> None:
    """Each kind by itself."""
    clock = ManualClock()
    seldom = Seldom(clock)
    assert [seldom.add("full", 2), seldom.add("full", 3), seldom.add("late", 1)] == [2, 0, 1]
    clock.advance(59.0)
    assert seldom.add("full", 1) == 0
    clock.advance(1.0)
    assert [seldom.add("full", 1), seldom.add("full", 1)] == [5, 0]


class Full(MemoryBackend):
    """Has no room."""

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        error = CapacityError("no room")
        return [TransferResult(write, TransferStatus.FULL, 0, 0.0, error) for write in writes]


async def test_a_tier_that_is_full_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line for three saves of eight chunks each; events have them all."""
    async with rig({"a": Full()}) as r:
        for name in ("x", "y", "z"):
            keys = await r.open(name)
            r.saver.save(name, keys)
            assert await r.saver.flush(20)
        assert r.dropped() == {("a", "full"): 3 * CHUNKS}
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["tier a: 1 chunk was not stored (full: no room)"]

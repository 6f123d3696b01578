"""What was learned about costs is kept when a flow is closed, however its disk is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cacheflow.session import keeping
from tests.cancelling import Held

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Learned:
    """What there is to save, one after the other."""

    def __init__(self, *saves: Callable[[], object]) -> None:
        self.saves = list(saves)

    def read(self) -> tuple[None, dict[str, Any]]:
        return None, {}

    def prime(self, compute: None, channels: dict[str, Any]) -> None:
        """Nothing was learned before."""

    def to_save(self) -> Callable[[], object] | None:
        return self.saves.pop(0) if self.saves else None


async def flow(learned: Learned, until: Held) -> None:
    """Open for as long as it takes to get to ``until``."""
    async with keeping.keeping(learned):  # type: ignore[arg-type]
        assert await asyncio.to_thread(until.began.wait, 20)


async def test_closing_waits_for_what_is_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """And saves what was learned meanwhile, behind it: the newer one stays."""
    monkeypatch.setattr(keeping, "_KEEP_SECONDS", 0.01)
    told: list[str] = []
    first = Held(lambda: told.append("first"))
    learned = Learned(first, lambda: told.append("last"))
    closing = asyncio.create_task(flow(learned, first))
    assert await asyncio.to_thread(first.began.wait, 20)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not told
    first.go.set()
    await closing
    assert told == ["first", "last"]


async def test_closing_does_not_wait_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds at most."""
    monkeypatch.setattr(keeping, "_KEEP_SECONDS", 0.01)
    monkeypatch.setattr(keeping, "_CLOSE_SECONDS", 0.01)
    hung = Held(lambda: None)
    await asyncio.wait_for(flow(Learned(hung), hung), 20)
    assert not hung.ended.is_set()
    hung.go.set()
    assert await asyncio.to_thread(hung.ended.wait, 20)

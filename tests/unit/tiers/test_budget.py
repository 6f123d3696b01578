"""The budget of a tier: whoever waits for it may leave at any time, alone or with others."""

from __future__ import annotations

import asyncio

import pytest

from cacheflow.tiers.budget import Budget


@pytest.mark.parametrize("leaving", [(0, 1, 2), (2, 1, 0), (1, 2), (0, 2)])
async def test_several_leave_at_once(leaving: tuple[int, ...]) -> None:
    """All of them end as cancelled, the others get their turns, and nothing stays taken."""
    budget, ends = Budget(1, 100), asyncio.Event()

    async def use() -> None:
        async with budget.taken(1, 10):
            await ends.wait()

    first = asyncio.create_task(use())
    waiting = [asyncio.create_task(use()) for _ in range(3)]
    await asyncio.sleep(0)
    assert budget.waiting == 3
    for index in leaving:
        waiting[index].cancel()
    ends.set()
    await asyncio.wait([first, *waiting])
    assert [task.cancelled() for task in waiting] == [index in leaving for index in range(3)]
    assert budget.under_way == (0, 0)
    assert budget.waiting == 0

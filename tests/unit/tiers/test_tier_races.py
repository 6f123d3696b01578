"""A tier whose object is stored while it is being deleted: the index stays what the medium has."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.testing.objects import make_object
from cacheflow.types import TransferStatus
from tests.unit.tiers.shelf import Shelf, rig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.types import ObjectKey, TransferResult, Write
    from tests.unit.tiers.shelf import Rig

KEY = make_object(0).key


@pytest.mark.parametrize("stored", ["after it was gone", "before it was gone"])
async def test_a_store_during_a_delete(stored: str) -> None:
    """Whichever came first in the backend, every byte that is there is accounted for, and what is
    not there is not counted."""
    async with rig(objects=5) as r:
        await r.store(0, 1)
        began, go = asyncio.Event(), asyncio.Event()
        real: Any = r.shelf.delete

        async def delete(keys: Sequence[Any]) -> list[bool]:
            deleted = await real(keys) if stored == "after it was gone" else []
            began.set()
            await go.wait()
            return deleted or await real(keys)

        r.shelf.delete = delete  # type: ignore[method-assign]
        deleting = asyncio.create_task(r.tier.delete([make_object(0).key]))
        await began.wait()
        assert await r.store(0) == [TransferStatus.OK]
        go.set()
        assert await deleting == [True]
        r.shelf.delete = real  # type: ignore[method-assign]
        assert r.there == ([0, 1] if stored == "after it was gone" else [1])
        await r.assert_exact()


class Stepped(Shelf):
    """Deletes and stores of object 0, once ``armed``, wait for a step before they happen and for
    another before they are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.steps = {"delete": asyncio.Semaphore(0), "store": asyncio.Semaphore(0)}

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        if KEY not in keys or not self.armed:
            return await super().delete(keys)
        await self.steps["delete"].acquire()
        deleted = await super().delete(keys)
        await self.steps["delete"].acquire()
        return deleted

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        if KEY not in [write.info.key for write in writes] or not self.armed:
            return await super().store(writes)
        await self.steps["store"].acquire()
        results = await super().store(writes)
        await self.steps["store"].acquire()
        return results


ORDERS = sorted({"".join(order) for order in permutations("dddsss")})
"""Every order in which a delete and a store can begin, happen and be answered."""


@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize("order", ORDERS)
async def test_every_order_of_a_delete_and_a_store(order: str, was_there: bool) -> None:
    """The index is what the backend has once both have ended, whichever of them came last there."""
    shelf = Stepped()
    async with rig(shelf) as r:
        await r.store(*([0, 1] if was_there else [1]))
        await _play(r, order, lambda: r.tier.delete([KEY]))
        await r.assert_exact()


@pytest.mark.parametrize("order", [order for order in ORDERS if not order.startswith("sss")])
async def test_every_order_of_an_expiry_and_a_store(order: str) -> None:
    """The same with an object that leaves by itself while it is being replaced."""
    shelf = Stepped()
    async with rig(shelf, ttl=10.0) as r:
        await r.store(0)
        r.clock.advance(10.0)
        await _play(r, order, r.tier.settle)
        await r.assert_exact()


@pytest.mark.parametrize("order", ["sdsd", "sdds", "dssd", "dsds"])
async def test_given_up_or_failed_in_the_middle(order: str) -> None:
    """A store that is cancelled during a delete, or the other way round, leaves a doubt that is
    settled by asking, not by what the other one has seen."""
    for gone in ("delete", "store"):
        shelf = Stepped()
        async with rig(shelf) as r:
            await r.store(0)
            await _play(r, order, lambda: r.tier.delete([KEY]), cancelled=gone)
            shelf.armed = False
            await r.assert_exact()


async def _play(
    r: Rig, order: str, leave: Callable[[], Awaitable[object]], cancelled: str = ""
) -> None:
    """Begin, do and answer in the order of the letters (d: ``leave``, s: a store); what is to be
    cancelled is instead of doing its last step."""
    shelf = r.shelf
    tasks: dict[str, asyncio.Future[object]] = {}
    assert isinstance(shelf, Stepped)
    shelf.armed = True
    begin: dict[str, Callable[[], Awaitable[object]]] = {
        "delete": leave,
        "store": lambda: r.store(0),
    }
    for at, letter in enumerate(order):
        name = {"d": "delete", "s": "store"}[letter]
        if name not in tasks:
            tasks[name] = asyncio.ensure_future(begin[name]())
        elif name == cancelled and letter not in order[at + 1 :]:
            tasks[name].cancel()
        else:
            shelf.steps[name].release()
        for _ in range(30):
            await asyncio.sleep(0)
    for name in tasks:  # those that were cancelled may have more to do
        for _ in range(2):
            shelf.steps[name].release()
    await asyncio.wait(tasks.values(), timeout=10)
    assert all(task.done() for task in tasks.values())

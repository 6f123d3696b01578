"""One thing at a time behind the requests, and nobody waits for what only waits itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.restore.pace import Pace
from cacheflow.testing.storage import MemoryBackend
from tests.unit.restore.saving import rig, turns_of_the_loop, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import TransferResult, Write

FOR_EVER = 1000.0


class Worker:
    """Takes one turn and stays in it until it may go."""

    def __init__(self, pace: Pace, *, hurry: bool = False) -> None:
        self.began, self.go = False, asyncio.Event()
        self.task = asyncio.ensure_future(self._run(pace, hurry))

    async def _run(self, pace: Pace, hurry: bool) -> None:
        async with pace.turn(hurry=hurry):
            self.began = True
            await self.go.wait()


async def test_the_next_begins_when_the_last_has_ended() -> None:
    """In the order of asking, one at a time."""
    pace = Pace(FOR_EVER)
    workers = [Worker(pace) for _ in range(4)]
    for number, worker in enumerate(workers):
        await turns_of_the_loop()
        assert [each.began for each in workers] == [at <= number for at in range(4)]
        worker.go.set()
    await asyncio.gather(*(worker.task for worker in workers))


async def test_nobody_waits_for_what_takes_long() -> None:
    """After a moment the next one begins beside it; that it ends at last lets in nobody more."""
    pace = Pace(1e-3)
    slow, slower = Worker(pace), Worker(pace)
    await until(lambda: slow.began and slower.began)
    pace._moment = FOR_EVER
    third = Worker(pace)
    await until(lambda: third.began)
    slow.go.set()
    slower.go.set()
    await asyncio.gather(slow.task, slower.task)
    fourth = Worker(pace)
    await turns_of_the_loop()
    assert not fourth.began
    for worker in (third, fourth):
        worker.go.set()
    await asyncio.gather(third.task, fourth.task)


async def test_in_a_hurry_nobody_waits() -> None:
    """Whoever is in a hurry begins at once, and holds up nobody."""
    pace = Pace(FOR_EVER)
    first, hurried = Worker(pace), Worker(pace, hurry=True)
    await turns_of_the_loop()
    assert hurried.began
    first.go.set()
    second = Worker(pace)
    await turns_of_the_loop()
    assert second.began
    for worker in (hurried, second):
        worker.go.set()
    await asyncio.gather(first.task, hurried.task, second.task)


async def test_while_somebody_waits_for_all_of_it_nobody_waits() -> None:
    """Inside a hurry turns begin at once, however many; afterwards as before."""
    pace = Pace(FOR_EVER)
    with pace.hurry(), pace.hurry():
        workers = [Worker(pace) for _ in range(3)]
        await turns_of_the_loop()
        assert all(worker.began for worker in workers)
    workers += [Worker(pace) for _ in range(2)]
    await turns_of_the_loop()
    assert [worker.began for worker in workers] == [True] * 4 + [False]
    for worker in workers:
        worker.go.set()
    await asyncio.gather(*(worker.task for worker in workers))


@pytest.mark.parametrize("steps", range(4))
async def test_cancelled_anywhere_the_turn_goes_on(steps: int) -> None:
    """Waiting for a turn or having it: the next one gets it."""
    for victim in range(2):
        pace = Pace(FOR_EVER)
        workers = [Worker(pace) for _ in range(3)]
        await turns_of_the_loop(steps)
        workers[victim].task.cancel()
        for worker in workers:
            worker.go.set()
        async with asyncio.timeout(10):
            await asyncio.wait([worker.task for worker in workers])
        assert [worker.task.cancelled() for worker in workers] == [at == victim for at in range(3)]


class Counted(MemoryBackend):
    """Notes how many stores, of all tiers, are under way at once."""

    under_way: list[int]

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self.under_way[0] += 1
        self.under_way[1] = max(self.under_way)
        await turns_of_the_loop(5)
        self.under_way[0] -= 1
        return await super().store(writes)


async def test_saving_takes_one_core_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies out of the engine, and stores in whichever tier, follow one another."""
    under_way, tiers = [0, 0], {name: Counted() for name in ("a", "b")}
    for tier in tiers.values():
        tier.under_way = under_way
    async with rig(tiers) as r:
        monkeypatch.setattr(r.saver._pace, "_moment", FOR_EVER)
        copy = r.saver._sealer.copy

        async def counted(*arguments: Any) -> Any:
            under_way[0] += 1
            under_way[1] = max(under_way)
            made = await copy(*arguments)
            under_way[0] -= 1
            return made

        monkeypatch.setattr(r.saver._sealer, "copy", counted)
        keys = await r.open("r")
        saved = r.saver.save("r", keys)
        await until(lambda: not any(each.pending for each in saved.values()))
        assert {each.stored for each in saved.values()} == {len(keys)}
        assert under_way == [0, 1]

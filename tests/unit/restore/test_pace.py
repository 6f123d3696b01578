"""One thing at a time behind the requests, with rests while others decode; nobody waits for what
only waits itself."""

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

    def __init__(self, pace: Pace) -> None:
        self.began, self.go = False, asyncio.Event()
        self.task = asyncio.ensure_future(self._run(pace))

    async def _run(self, pace: Pace) -> None:
        async with pace.turn():
            self.began = True
            await self.go.wait()


async def test_the_next_begins_when_the_last_has_ended() -> None:
    """In the order of asking, one at a time."""
    pace = Pace(moment=FOR_EVER)
    workers = [Worker(pace) for _ in range(4)]
    for number, worker in enumerate(workers):
        await turns_of_the_loop()
        assert [each.began for each in workers] == [at <= number for at in range(4)]
        worker.go.set()
    await asyncio.gather(*(worker.task for worker in workers))


async def test_nobody_waits_for_what_takes_long() -> None:
    """After a moment the next one begins beside it; that it ends at last lets in nobody more."""
    pace = Pace(moment=1e-3)
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


def restless(is_decoding: Sequence[bool]) -> Pace:
    """Rests for ever after whatever took any time, if it is said to be needed: the answers when a
    turn begins and when it is over, turn by turn."""
    answers = iter(is_decoding)
    return Pace(lambda: next(answers), moment=FOR_EVER, share=1e-12)


@pytest.mark.parametrize("decoding", [(True, False), (False, True), (True, True)])
async def test_while_tokens_are_decoded_work_is_rested_from(decoding: tuple[bool, bool]) -> None:
    """However short it was, and whether a token was decoded when it began or when it was over."""
    pace = restless([*decoding, *decoding])
    first, second = Worker(pace), Worker(pace)
    await turns_of_the_loop()
    first.go.set()
    await first.task
    await turns_of_the_loop()
    assert not second.began
    with pace.hurry():
        pass
    await until(lambda: second.began)
    second.go.set()
    await second.task


async def test_a_rest_ends_by_itself() -> None:
    """And is in proportion to the work, which is next to nothing here."""
    pace = Pace(lambda: True, moment=FOR_EVER, share=0.5)
    workers = [Worker(pace) for _ in range(4)]
    for worker in workers:
        worker.go.set()
    async with asyncio.timeout(20):
        await asyncio.gather(*(worker.task for worker in workers))


async def test_nobody_rests_while_nothing_is_decoded() -> None:
    """The next one begins in the same turn of the loop."""
    pace = restless([False] * 4)
    first, second = Worker(pace), Worker(pace)
    await turns_of_the_loop()
    first.go.set()
    await turns_of_the_loop()
    assert second.began
    second.go.set()
    await asyncio.gather(first.task, second.task)


async def test_a_hurry_lets_in_whoever_waits() -> None:
    """At once, all of them, whether it is behind work or behind a rest."""
    for resting in (False, True):
        pace = restless([True] * 9)
        workers = [Worker(pace) for _ in range(3)]
        await turns_of_the_loop()
        if resting:
            workers[0].go.set()
            await workers[0].task
        assert [worker.began for worker in workers] == [True, False, False]
        with pace.hurry():
            await turns_of_the_loop()
            assert all(worker.began for worker in workers)
        for worker in workers:
            worker.go.set()
        await asyncio.gather(*(worker.task for worker in workers))


async def test_while_somebody_waits_for_all_of_it_nobody_waits() -> None:
    """Inside a hurry turns begin at once, however many; afterwards as before."""
    pace = Pace(moment=FOR_EVER)
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
        pace = Pace(moment=FOR_EVER)
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
        capture = r.engine.capture

        async def counted(*arguments: Any) -> None:
            under_way[0] += 1
            under_way[1] = max(under_way)
            await capture(*arguments)
            under_way[0] -= 1

        monkeypatch.setattr(r.engine, "capture", counted)
        keys = await r.open("r")
        saved = r.saver.save("r", keys)
        await until(lambda: not any(each.pending for each in saved.values()))
        assert {each.stored for each in saved.values()} == {len(keys)}
        assert under_way == [0, 1]


async def test_whoever_waits_for_saved_chunks_waits_for_no_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the requests a save rests from its first copy on; it is over at once when somebody
    flushes, closes the request, or looks for what is just being copied."""
    for ask in ("flush", "release", "settle"):
        async with rig({"a": MemoryBackend()}) as r:
            monkeypatch.setattr(r.saver._pace, "_is_decoding", lambda: True)
            monkeypatch.setattr(r.saver._pace, "_rest_of", 1e12)
            keys = await r.open("r")
            saved = r.saver.save("r", keys)
            await until(lambda: r.saver._pace._rest is not None)
            await turns_of_the_loop()
            assert r.staged_chunks < len(keys)
            async with asyncio.timeout(20):
                match ask:
                    case "flush":
                        assert await r.saver.flush()
                    case "release":
                        await r.saver.release(["r"], patience=10)
                    case "settle":
                        await r.saver._settle(keys)
                await r.saver.flush()
            assert saved["a"].stored == len(keys)
            assert not saved["a"].dropped

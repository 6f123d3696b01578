"""Saving behind the requests: bounded, tiers apart, one copy for all, nothing left at the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import cacheflow.restore.writer
import cacheflow.tiers.staged
from cacheflow.errors import ClosedError
from cacheflow.kv import chunk_keys, decode_header
from cacheflow.restore.saver import Saved
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import Segment
from tests.unit.restore.saving import (
    CHUNKS,
    Gated,
    Skip,
    rig,
    turns_of_the_loop,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkInfo, ChunkKey


@pytest.mark.both_loops
async def test_a_hung_tier_holds_up_nobody_and_chunks_are_copied_once() -> None:
    """Saving returns before anything is stored; the good tier gets all of it while the other one
    hangs, and both are served from one copy of each chunk."""
    good, hung = Gated(), Gated()
    hung.gate = asyncio.Semaphore(0)
    async with rig({"hung": hung, "good": good}) as r:
        keys = await r.open("r")
        saved = r.saver.save("r", keys)
        assert saved == {"hung": Saved(pending=CHUNKS), "good": Saved(pending=CHUNKS)}
        await until(lambda: saved["good"].stored == CHUNKS)
        assert saved["hung"] == Saved(pending=CHUNKS)
        assert not await r.saver.flush(0)
        for _ in range(CHUNKS):
            hung.gate.release()
        assert await r.saver.flush(20)
        assert saved["hung"] == Saved(stored=CHUNKS)
        assert sorted(r.engine.captures) == [("r", chunk) for chunk in range(CHUNKS)]
        assert hung.objects == good.objects


async def test_what_waits_in_memory_is_bounded_for_each_tier() -> None:
    """No more copies than its share are kept for a tier that hangs, while the other stores on; the
    rest waits in the engine and is stored when there is room."""
    good, hung = Gated(), Gated()
    hung.gate = asyncio.Semaphore(0)
    async with rig({"hung": hung, "good": good}, room=3) as r:
        saved = r.saver.save("r", await r.open("r"))
        await until(lambda: saved["good"].stored == CHUNKS)
        await turns_of_the_loop()
        assert r.staged_chunks == 3
        for _ in range(CHUNKS):
            hung.gate.release()
            await turns_of_the_loop()
            assert r.staged_chunks <= 3
        assert await r.saver.flush(20)
        assert saved["hung"] == Saved(stored=CHUNKS)


async def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bound chunks are dropped at once, with an event that says why; the dearest to
    recompute, the last ones, are kept."""
    monkeypatch.setattr(cacheflow.restore.writer, "MAX_QUEUED", 5)
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}) as r:
        keys = await r.open("r")
        saved = r.saver.save("r", keys)["t"]
        await until(lambda: saved.dropped)
        assert saved == Saved(dropped=3, pending=5)
        assert r.dropped() == {("t", "crowded"): 3}
        for _ in range(5):
            tier.gate.release()
        assert await r.saver.flush(20)
        assert {key.chunk for key in tier.objects} == set(keys[3:])


async def test_a_request_that_is_closed_keeps_what_there_is_room_for() -> None:
    """Before a request is closed its chunks are copied as far as there is room, at once; the others
    are dropped and counted, and nothing waits for the tier."""
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}, room=3) as r:
        saved = r.saver.save("r", await r.open("r"))["t"]
        await r.saver.release(["r"])
        await r.engine.close("r")
        assert saved == Saved(pending=3, dropped=CHUNKS - 3)
        assert r.dropped() == {("t", "forgotten"): CHUNKS - 3}
        for _ in range(CHUNKS):
            tier.gate.release()
        assert await r.saver.flush(20)
        assert saved == Saved(stored=3, dropped=CHUNKS - 3)
        chunks = {decode_header(memoryview(data)).segments for data in tier.objects.values()}
        assert chunks == {(Segment(64, 128, 64),)}


async def test_with_patience_a_request_that_is_closed_waits_for_room() -> None:
    """While the tier goes on storing, nothing of a closing request is lost."""
    tier = Gated()
    async with rig({"t": tier}, room=2) as r:
        saved = r.saver.save("r", await r.open("r"))["t"]
        await r.saver.release(["r"], patience=20)
        await r.engine.close("r")
        assert saved.dropped == 0
        assert await r.saver.flush(20)
        assert saved == Saved(stored=CHUNKS)


async def test_a_request_closed_without_notice_loses_only_what_was_not_copied() -> None:
    """Closing it in the engine under a save is counted, not an error of anybody."""
    tier = Gated()
    tier.gate = asyncio.Semaphore(0)
    async with rig({"t": tier}, room=2) as r:
        saved = r.saver.save("r", await r.open("r"))["t"]
        await until(lambda: len(r.staged._copies) == 2)
        await r.engine.close("r")
        for _ in range(CHUNKS):
            tier.gate.release()
        assert await r.saver.flush(20)
        assert saved.stored + saved.dropped == CHUNKS
        assert saved.stored in (2, 3)
        assert r.dropped() == {("t", "forgotten"): saved.dropped}


async def test_a_hung_lookup_holds_up_closing_a_request_for_a_moment_only() -> None:
    """A tier that does not say what it has gets nothing of a request that is closed meanwhile."""
    hung, good = MemoryBackend(), MemoryBackend()
    answered = asyncio.Event()
    hung.before_lookup = answered.wait  # type: ignore[assignment]
    async with rig({"hung": hung, "good": good}) as r:
        saved = r.saver.save("r", await r.open("r"))
        async with asyncio.timeout(5):
            await r.saver.release(["r"])
        await r.engine.close("r")
        answered.set()
        assert await r.saver.flush(20)
        assert saved == {"hung": Saved(dropped=CHUNKS), "good": Saved(stored=CHUNKS)}
        assert r.dropped() == {("hung", "forgotten"): CHUNKS}


async def test_what_the_policy_leaves_out_is_neither_asked_for_nor_stored() -> None:
    """Skipped chunks are counted as such; promotion goes by the same rule."""
    fast, slow = MemoryBackend(), MemoryBackend()
    async with rig({"fast": fast, "slow": slow}, policy=Skip(3)) as r:
        keys = await r.open("r")
        saved = r.saver.save("r", keys)
        assert await r.saver.flush(20)
        assert saved == dict.fromkeys(("fast", "slow"), Saved(stored=5, skipped=3))
        assert {key.chunk for key in fast.objects} == set(keys[3:])
        fast.objects.clear()
        promoted = r.saver.promote("r", keys, {"fast": (1, 2, 3, 6)})
        assert await r.saver.flush(20)
        assert promoted == {"fast": Saved(stored=2)}
        assert {key.chunk for key in fast.objects} == {keys[3], keys[6]}
        again = r.saver.promote("r", keys, {"fast": (3, 4)})
        assert await r.saver.flush(20)
        assert again == {"fast": Saved(stored=1, kept=1)}


async def test_a_tier_is_told_where_in_the_prompt_lies_what_it_is_asked_about() -> None:
    """Of a prompt whose head is left out, and of single chunks that are promoted: the keys of the
    whole prompt, and which of them are meant."""
    tier = Surveyed()
    async with rig({"tier": tier}, policy=Skip(3)) as r:
        keys = await r.open("r")
        r.saver.save("r", keys)
        assert await r.saver.flush(20)
        r.saver.promote("r", keys, {"tier": (1, 4, 6)})
        assert await r.saver.flush(20)
        assert tier.asked == [(keys, [3, 4, 5, 6, 7]), (keys, [4, 6])]


class Surveyed(MemoryBackend):
    """Remembers what it was asked by who stores."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Sequence[ChunkKey], list[int]]] = []

    async def survey(
        self, keys: Sequence[ChunkKey], wanted: Sequence[int]
    ) -> list[Sequence[ChunkInfo]]:
        self.asked.append((keys, list(wanted)))
        return await super().survey(keys, wanted)


async def test_what_a_tier_declines_is_not_even_copied() -> None:
    """A tier that has better things is asked chunk by chunk, from the last on, with where its KV
    was computed; the others get theirs."""
    choosy, plain = Choosy(), MemoryBackend()
    async with rig({"choosy": choosy, "plain": plain}) as r:
        keys = await r.open("r")
        saved = r.saver.save("r", keys)
        assert await r.saver.flush(20)
        assert saved["choosy"] == Saved(stored=CHUNKS // 2, skipped=CHUNKS - CHUNKS // 2)
        assert saved["plain"] == Saved(stored=CHUNKS)
        assert [key for key, *_ in choosy.asked] == list(reversed(keys))
        size = r.engine.layout.chunk_tokens
        for index, (_, start, stop, cells) in zip(range(CHUNKS)[::-1], choosy.asked, strict=True):
            assert start <= index * size < (index + 1) * size <= stop
            assert cells == size * r.engine.layout.num_layers


class Choosy(MemoryBackend):
    """Takes half of what it is offered, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[ChunkKey, int, int, int]] = []

    def declines(self, chunk: ChunkKey, start: int, stop: int, cells: int) -> bool:
        self.asked.append((chunk, start, stop, cells))
        return len(self.asked) > CHUNKS // 2


@pytest.mark.parametrize("room", [2, 16])
async def test_closed_anywhere_nothing_is_left(room: int) -> None:
    """Closed after any number of loop steps, through lookups, copies, seals and stores, some of
    which hang: every chunk is counted once, and no task, turn, copy or staged byte stays."""
    steps, stored = 0, 0
    while stored < CHUNKS:
        good, hung = MemoryBackend(), Gated()
        hung.gate = asyncio.Semaphore(2)
        before = asyncio.all_tasks()
        async with rig({"good": good, "hung": hung}, room=room) as r:
            saved = r.saver.save("r", await r.open("r"))
            r.saver.save("r", await r.open("twin") and chunk_keys(b"x" * 32, [1] * 64, 16))
            await turns_of_the_loop(steps)
        assert asyncio.all_tasks() == before
        assert {tier: each.pending for tier, each in saved.items()} == {"good": 0, "hung": 0}
        for each in saved.values():
            assert each.stored + each.dropped == CHUNKS
        assert saved["hung"].stored <= 2
        assert saved["good"].stored <= len(good.objects) <= saved["good"].stored + 8
        stored = saved["good"].stored
        steps += 1 + steps // 8


async def test_waiting_can_be_given_up_anywhere() -> None:
    """Whoever waits for what is to be stored, or closes a request, may be cancelled at any await;
    saving goes on, or is counted as lost."""
    for steps in range(12):
        tier = Gated()
        tier.gate = asyncio.Semaphore(0)
        async with rig({"t": tier}, room=2) as r:
            saved = r.saver.save("r", await r.open("r"))["t"]
            waiting = [
                asyncio.create_task(r.saver.flush()),
                asyncio.create_task(r.saver.release(["r"], patience=20)),
            ]
            await turns_of_the_loop(steps)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert all(task.cancelled() for task in waiting)
            await r.engine.close("r")
            for _ in range(CHUNKS):
                tier.gate.release()
            assert await r.saver.flush(20)
            assert saved.stored + saved.dropped == CHUNKS
            assert saved.stored == len(tier.objects)


async def test_a_closed_saver_takes_nothing() -> None:
    """Saving after it was closed is refused with our own error."""
    async with rig({"t": MemoryBackend()}) as r:
        keys = await r.open("r")
    with pytest.raises(ClosedError):
        r.saver.save("r", keys)

"""Copies on threads: nothing is lost, everything is let go of, whoever gets in the way."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import threading
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.errors import ClosedError
from cacheflow.memory import buffer_from
from cacheflow.storage_backends.copying import Copies, Copy
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.testing.objects import make_object
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import TransferResult

KEY = make_object(0).key


def copies_of(*sizes: int) -> list[Copy]:
    return [
        Copy(Read(KEY, 0, buffer_from(bytearray(size))), buffer_from(bytes([at % 251]) * size))
        for at, size in enumerate(sizes)
    ]


def in_flight(copies: Sequence[Copy]) -> list[int]:
    return [
        copy.read.buffer.hold.in_flight + (copy.source.hold.in_flight if copy.source else 0)
        for copy in copies
    ]


async def results_of(copies: Copies) -> list[list[TransferResult]]:
    """Group by group."""
    groups: list[list[TransferResult]] = []
    try:
        copies.begin()
        while group := await copies.after(sum(map(len, groups))):
            groups.append(group)
    finally:
        copies.leave()
    return groups


class Held:
    """``memmove`` that waits in its first call."""

    def __init__(self) -> None:
        self.began, self.go, self.calls = threading.Event(), threading.Event(), 0
        self._memmove: Callable[[int, int, int], object] = ctypes.memmove

    def __call__(self, to: int, source: int, nbytes: int) -> None:
        self.calls += 1
        if not self.began.is_set():
            self.began.set()
            self.go.wait(30)
        self._memmove(to, source, nbytes)


async def test_every_copy_is_made() -> None:
    """All bytes, each read's own result, no hold left."""
    threads, copies = IoThreads(2, "test"), copies_of(*[1000 + at for at in range(30)])
    results = [each for group in await results_of(Copies(threads, copies)) for each in group]
    assert {id(result.request) for result in results} == {id(copy.read) for copy in copies}
    assert {result.status for result in results} == {TransferStatus.OK}
    for read, source in copies:
        assert source is not None
        assert read.buffer.view == source.view
    assert not any(in_flight(copies))
    assert await threads.aclose(1.0)


@pytest.mark.parametrize(
    ("sizes", "woken"), [([100] * 5, 1), ([100] * 17, 3), ([4 << 20] * 2, 2), ([1 << 20] * 64, 4)]
)
async def test_threads_are_woken_for_what_there_is(sizes: list[int], woken: int) -> None:
    """What one thread copies in one go wakes one; never more than there are."""
    threads = IoThreads(4, "test")
    load = Copies(threads, copies_of(*sizes))
    load.begin()
    assert len(load._jobs) == woken
    given = 0
    while group := await load.after(given):
        given += len(group)
    load.leave()
    assert given == len(sizes)
    assert await threads.aclose(1.0)


@pytest.mark.parametrize(
    ("offset", "status", "nbytes"),
    [
        (0, TransferStatus.OK, 10),
        (15, TransferStatus.SHORT, 5),
        (20, TransferStatus.SHORT, 0),
        (99, TransferStatus.SHORT, 0),
        (None, TransferStatus.MISSING, 0),
    ],
)
async def test_what_is_not_there(offset: int | None, status: TransferStatus, nbytes: int) -> None:
    """A read beyond the end is short, one of no object is missing."""
    threads = IoThreads(1, "test")
    read = Read(KEY, offset or 0, buffer_from(bytearray(10)))
    source = None if offset is None else buffer_from(bytes(range(20)))
    [[result]] = await results_of(Copies(threads, [Copy(read, source)]))
    assert (result.status, result.nbytes) == (status, nbytes)
    assert bytes(read.buffer.view or b"")[:nbytes] == bytes(range(20))[offset or 0 :][:nbytes]
    assert await threads.aclose(1.0)


async def test_a_thread_that_is_held_up_keeps_one_copy() -> None:
    """The other threads make the rest of the load, and their results come when they have made a
    group, not when the load is complete."""
    threads, copies, held = IoThreads(2, "test"), copies_of(*[100] * 30), Held()
    with mock.patch.object(ctypes, "memmove", held):
        load = Copies(threads, copies)
        load.begin()
        assert await asyncio.to_thread(held.began.wait, 10)
        given = 0
        while given < 24:
            given += len(await load.after(given))
        held.go.set()
        while group := await load.after(given):
            given += len(group)
    assert given == 30
    load.leave()
    assert await threads.aclose(10.0)


async def test_leaving_lets_go_of_what_has_not_begun() -> None:
    """Only the copy that a thread is in stays held, until it has been made; no other is made."""
    threads, copies, held = IoThreads(1, "test"), copies_of(*[100] * 30), Held()
    with mock.patch.object(ctypes, "memmove", held):
        task = asyncio.create_task(results_of(Copies(threads, copies)))
        assert await asyncio.to_thread(held.began.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        assert in_flight(copies) == [2] + [0] * 29
        held.go.set()
        assert await threads.aclose(10.0)
    assert held.calls == 1
    assert not any(in_flight(copies))


async def test_closing_ends_a_load() -> None:
    """Closing with a copy under way: its consumer gets ClosedError, the rest is let go of."""
    threads, copies, held = IoThreads(2, "test"), copies_of(*[100] * 30), Held()
    with mock.patch.object(ctypes, "memmove", held):
        load = Copies(threads, copies[:1])
        load.begin()
        assert await asyncio.to_thread(held.began.wait, 10)
        assert not await threads.aclose(0.01)
        with pytest.raises(ClosedError):
            await load.after(0)
        with pytest.raises(ClosedError):
            await results_of(Copies(threads, copies[1:]))
        assert in_flight(copies) == [2] + [0] * 29
        held.go.set()
        await asyncio.to_thread(threads._threads[0].join, 10)
        await asyncio.to_thread(threads._threads[1].join, 10)
    load.leave()
    assert not any(in_flight(copies))


async def test_a_bug_lets_go_of_everything() -> None:
    """An error on a thread is raised where the results are awaited; nothing stays held."""
    threads, copies = IoThreads(2, "test"), copies_of(*[100] * 30)
    with (
        mock.patch.object(ctypes, "memmove", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        await results_of(Copies(threads, copies))
    assert await threads.aclose(10.0)
    assert not any(in_flight(copies))


async def test_many_loads_at_once_lose_nothing() -> None:
    """Loads of all sizes in each other's way, some of them left early: every result of the others
    comes, and every buffer is let go of."""
    threads, chance = IoThreads(3, "test"), random.Random(5)
    loads = [
        copies_of(*[chance.randrange(200) for _ in range(chance.randrange(20))]) for _ in range(300)
    ]

    async def consume(copies: list[Copy], leave_after: int | None) -> None:
        load, given = Copies(threads, copies), 0
        try:
            load.begin()
            while group := await load.after(given):
                given += len(group)
                if leave_after is not None and given >= leave_after:
                    return
            assert given == len(copies)
        finally:
            load.leave()

    async with asyncio.timeout(20):
        leaving = (chance.choice([None, None, 1, 4]) for _ in loads)
        await asyncio.gather(*map(consume, loads, leaving))
        assert await threads.aclose(10.0)
    assert not any(number for copies in loads for number in in_flight(copies))


async def test_a_load_leaves_no_work_for_the_garbage_collector() -> None:
    """A load goes with its last reference, not as a cycle: collecting those holds everybody up."""
    threads = IoThreads(1, "test")
    gc.collect()
    gc.disable()
    try:
        await results_of(Copies(threads, copies_of(*[100] * 5)))
        await threads.run(lambda: None)  # the thread has let go of it, too
        assert [each for each in gc.get_objects() if type(each) is Copies] == []
    finally:
        gc.enable()
    assert await threads.aclose(1.0)

"""Reads on threads: one that fails, hangs or is abandoned does not take the others with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cacheflow.storage_backends.loading import load_on_threads
from cacheflow.storage_backends.threads import IoThreads
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.types import Read, TransferStatus

KEY = make_object(0).key


def reads_of(count: int) -> list[Read]:
    return [Read(KEY, at, aligned_buffer(1)) for at in range(count)]


async def test_a_read_that_fails_is_one_result() -> None:
    """An OSError is the result of its own read only."""
    threads, reads = IoThreads(1, "test"), reads_of(3)

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        if read.offset == 1:
            raise OSError(5, "Input/output error")
        return TransferStatus.OK, 1

    results = [result async for result in load_on_threads(threads, reads, read_into)]
    assert [result.status for result in results] == [
        TransferStatus.OK,
        TransferStatus.FAILED,
        TransferStatus.OK,
    ]
    assert "Input/output error" in str(results[1].error)
    assert await threads.aclose(1.0)


async def test_a_bug_lets_go_of_everything() -> None:
    """Any other error is raised, and no buffer stays held."""
    threads, reads = IoThreads(1, "test"), reads_of(3)
    released: list[Read] = []

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        raise ZeroDivisionError

    load = load_on_threads(threads, reads, read_into, released.append)
    with pytest.raises(ZeroDivisionError):
        await anext(load)
    assert await threads.aclose(1.0)
    assert sorted(read.offset for read in released) == [0, 1, 2]
    assert not any(read.buffer.hold.in_flight for read in reads)


async def test_no_result_waits_for_a_read_that_hangs() -> None:
    """While one thread is held up in a read, the others go on with the rest of the load, and their
    results arrive."""
    threads, reads, go = IoThreads(2, "test"), reads_of(20), threading.Event()

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        if read.offset == 0:
            go.wait(30)
        return TransferStatus.OK, 1

    load = load_on_threads(threads, reads, read_into)
    others = [await anext(load) for _ in range(19)]
    assert {r.request.offset for r in others if isinstance(r.request, Read)} == set(range(1, 20))
    go.set()
    assert (await anext(load)).request == reads[0]
    await load.aclose()
    assert await threads.aclose(10.0)


async def test_an_abandoned_load_keeps_only_what_has_begun() -> None:
    """Leaving while a thread is in a read: that stays held until it is through, the others are let
    go of at once and never read."""
    threads, reads = IoThreads(1, "test"), reads_of(20)
    began, go = threading.Event(), threading.Event()
    read_at: list[int] = []

    def read_into(read: Read) -> tuple[TransferStatus, int]:
        read_at.append(read.offset)
        began.set()
        go.wait(30)
        return TransferStatus.OK, 1

    load: Any = load_on_threads(threads, reads, read_into)
    first = asyncio.ensure_future(anext(load))
    assert await asyncio.to_thread(began.wait, 10)
    first.cancel()
    await asyncio.wait([first])
    await load.aclose()
    held = [read.offset for read in reads if read.buffer.hold.in_flight]
    assert held == [0]
    go.set()
    assert await threads.aclose(10.0)
    assert read_at == held
    assert not any(read.buffer.hold.in_flight for read in reads)

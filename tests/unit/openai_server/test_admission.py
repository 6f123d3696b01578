"""The turnstile: who runs, who waits, who is sent away."""

from __future__ import annotations

import asyncio

import pytest

from cacheflow.plugins.openai_server.admission import Admission
from cacheflow.plugins.openai_server.errors import ApiError


def gate(running: int = 1, waiting: int = 1, patience: float = 60.0) -> tuple[Admission, list[str]]:
    reasons: list[str] = []
    return Admission(running, waiting, patience, reasons.append), reasons


async def hold(admission: Admission, until: asyncio.Event, order: list[int], number: int) -> None:
    async with admission.place():
        order.append(number)
        await until.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_wait_come_in_order_and_the_rest_is_sent_away() -> None:
    """One runs, two wait, the fourth gets a 429 that says when to come again."""
    admission, reasons = gate(waiting=2)
    until, order = asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(hold(admission, until, order, n)) for n in range(3)]
    await settle()
    assert (admission.running, admission.waiting) == (1, 2)
    with pytest.raises(ApiError) as refused:
        async with admission.place():
            pass
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert reasons == ["busy"]
    until.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_wait_that_is_too_long_ends() -> None:
    """Whoever waited as long as is allowed gets a 429, and its place in the queue is free."""
    admission, reasons = gate(patience=0.01)
    until = asyncio.Event()
    first = asyncio.create_task(hold(admission, until, [], 0))
    await settle()
    with pytest.raises(ApiError) as refused:
        async with admission.place():
            pass
    assert refused.value.status == 429
    assert (admission.waiting, reasons) == (0, ["busy"])
    until.set()
    await first


async def test_cancelling_leaves_no_place_taken() -> None:
    """A request cancelled while it runs or waits frees its place."""
    admission, _ = gate(waiting=3)
    until = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, until, [], n)) for n in range(4)]
    await settle()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (admission.running, admission.waiting) == (0, 0)
    async with admission.place():
        assert admission.running == 1


async def test_drain_waits_for_those_inside_and_takes_no_more() -> None:
    """Draining, new requests get a 503; it is over when the last one has ended."""
    admission, reasons = gate(waiting=1)
    until, order = asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(hold(admission, until, order, n)) for n in range(2)]
    await settle()
    assert not await admission.drain(0.01)
    with pytest.raises(ApiError) as refused:
        async with admission.place():
            pass
    assert refused.value.status == 503
    assert reasons == ["draining"]
    draining = asyncio.create_task(admission.drain(60))
    until.set()
    await asyncio.gather(*tasks)
    assert await draining
    assert order == [0, 1]

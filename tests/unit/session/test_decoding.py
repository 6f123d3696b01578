"""The decode loop: who takes part in a step, and what one that breaks off costs the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.session.decoding import DecodeLoop
from cacheflow.testing.serving import ServingEngine, next_token
from cacheflow.types import Claim, ComputeBatch, TileWork
from tests.unit.session.conftest import Held, cold, prompt_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.session.conftest import Opened


@pytest.fixture
async def engine() -> AsyncIterator[ServingEngine]:
    made = ServingEngine(kv_tokens=3 * 64)
    yield made
    await made.aclose()


async def ready(engine: ServingEngine, name: str, tokens: int) -> list[int]:
    """An open request with its whole prompt computed."""
    prompt = prompt_of(tokens)
    await engine.open(name, prompt)
    for tile in engine.grid.split(0, tokens):
        work = ComputeBatch((TileWork(name, tile, 0, is_suffix=True),))
        await engine.recompute(work, lambda _work, _layer: Claim.WRITE)
    return prompt


async def test_who_is_ready_takes_part(opened: Opened) -> None:
    """Eight sessions that decode at once share their steps, each with the tokens of a cold run."""
    async with opened() as play:
        sessions = [play.flow.session(f"s{i}") for i in range(8)]
        streams = [
            session.generate(prompt_of(20, i), max_new_tokens=20)
            for i, session in enumerate(sessions)
        ]
        firsts = [await anext(stream) for stream in streams]

        async def rest(i: int) -> list[int]:
            return [firsts[i], *[token async for token in streams[i]]]

        made = await asyncio.gather(*(rest(i) for i in range(8)))
        assert made == [cold(prompt_of(20, i), 20) for i in range(8)]
        assert sum(map(len, play.engine.steps)) == 8 * 19
        assert len(play.engine.steps) <= 20
        assert play.flow.decoding.rows == 8 * 19


async def test_a_slow_consumer_holds_up_nobody(opened: Opened) -> None:
    """A session whose consumer does not ask takes part in no step, and the others go on."""
    async with opened() as play:
        slow = play.flow.session("slow").generate(prompt_of(20, 1), max_new_tokens=20)
        made = [await anext(slow)]
        await play.ask(play.flow.session("quick"), prompt_of(20, 2), 20)
        assert all("slow" not in name for step in play.engine.steps for name in step)
        made += [token async for token in slow]
        assert made == cold(prompt_of(20, 1), 20)


async def test_cancelled_before_its_step_nothing_is_appended(engine: ServingEngine) -> None:
    """... and cancelled in it, the step ends first."""
    loop, held = DecodeLoop(engine), Held()
    prompts = {name: await ready(engine, name, 20) for name in ("a", "b")}
    engine.before_step = held.wait
    async with loop.running():
        inside = asyncio.create_task(loop.next("a", 5))
        await held.began.wait()
        before = asyncio.create_task(loop.next("b", 6))
        await asyncio.sleep(0)
        before.cancel()
        inside.cancel()
        await asyncio.wait([before])
        assert not inside.done()
        held.go.set()
        await asyncio.wait([inside])
        assert inside.cancelled()
        assert engine.steps == [["a"]]
        assert await loop.next("b", 7) == next_token([*prompts["b"], 7])
        assert await loop.next("a", 8) == next_token([*prompts["a"], 5, 8])
    for name in prompts:
        await engine.close(name)


async def test_no_room_for_one_row_fails_that_row(engine: ServingEngine) -> None:
    """A request without room for another page fails alone, and one that is closed too."""
    loop = DecodeLoop(engine)
    full, fits = await ready(engine, "full", 64), await ready(engine, "fits", 20)
    await engine.open("rest", prompt_of(32, 3))
    await engine.open("more", prompt_of(32, 4))
    async with loop.running():
        results = await asyncio.gather(
            *(loop.next(name, 5) for name in ("full", "fits", "gone")), return_exceptions=True
        )
        assert isinstance(results[0], CapacityError)
        assert results[1] == next_token([*fits, 5])
        assert isinstance(results[2], ClosedError)
        await engine.close("rest")
        await engine.close("more")
        assert await loop.next("full", 5) == next_token([*full, 5])
    for name in ("full", "fits"):
        await engine.close(name)


async def test_an_engine_that_fails_costs_the_rows_of_that_step(engine: ServingEngine) -> None:
    """Whoever was in the step gets the error; the loop goes on."""
    loop = DecodeLoop(engine)
    prompt = await ready(engine, "a", 20)

    async def fail() -> None:
        raise RuntimeError("the device is gone")

    engine.before_step = fail
    async with loop.running():
        with pytest.raises(RuntimeError, match="device"):
            await loop.next("a", 5)
        engine.before_step = None
        assert await loop.next("a", 5) == next_token([*prompt, 5])
    await engine.close("a")


async def test_closing_fails_what_waits(engine: ServingEngine) -> None:
    """The step under way ends; those that wait for the next one are told."""
    loop, held = DecodeLoop(engine), Held()
    prompts = {name: await ready(engine, name, 20) for name in ("a", "b")}
    engine.before_step = held.wait
    async with loop.running():
        inside = asyncio.create_task(loop.next("a", 5))
        await held.began.wait()
        waits = asyncio.create_task(loop.next("b", 5))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(held.go.set)
    assert await inside == next_token([*prompts["a"], 5])
    with pytest.raises(ClosedError):
        await waits
    with pytest.raises(ClosedError):
        await loop.next("a", 6)
    for name in prompts:
        await engine.close(name)

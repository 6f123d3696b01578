"""Whose KV leaves memory when there is no room for another's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import CapacityError, ClosedError
from tests.unit.session.conftest import cold, prompt_of

if TYPE_CHECKING:
    from tests.unit.session.conftest import Opened


async def test_the_session_used_longest_ago_makes_room(opened: Opened) -> None:
    """Nobody is refused while idle sessions hold memory, and what they had is stored."""
    async with opened(kv_tokens=6 * 64) as play:
        sessions = [play.flow.session(f"s{i}") for i in range(8)]
        for i, session in enumerate(sessions):
            await play.ask(session, prompt_of(50, i))
        assert [s.resident_tokens > 0 for s in sessions] == [False] * 2 + [True] * 6
        assert play.flow.room.made == 2
        await play.flow.flush()
        report = await play.ask(sessions[0], prompt_of(50, 0))
        assert report.cached_tokens == 48
        assert sessions[2].resident_tokens == 0


async def test_hints_say_who_goes_first(opened: Opened) -> None:
    """Done before idle before unsaid before waiting before active; none changes a token."""
    async with opened(kv_tokens=5 * 64) as play:
        names = ("active", "waiting", "", "idle", "done")
        sessions = {}
        for i, name in enumerate(names):
            sessions[name] = play.flow.session(name or "unsaid")
            await play.ask(sessions[name], prompt_of(50, i))
            if name:
                await sessions[name].hint(name)  # type: ignore[arg-type]
        for i, name in enumerate(reversed(names)):
            if name != "active":
                assert sessions[name].resident_tokens
                newcomer = play.flow.session(f"new{i}")
                await play.ask(newcomer, prompt_of(50, 10 + i))
                await newcomer.hint("active", priority=9)
                assert not sessions[name].resident_tokens, name
        assert sessions["active"].resident_tokens


async def test_advice_expires(opened: Opened) -> None:
    """After its time a hint counts no longer."""
    async with opened(kv_tokens=2 * 64) as play:
        kept, gone = play.flow.session("kept"), play.flow.session("gone")
        await play.ask(gone, prompt_of(50, 1))
        await play.ask(kept, prompt_of(50, 2))
        await gone.hint("active", ttl=1e-9)
        await kept.hint("waiting", ttl=60)
        await play.ask(play.flow.session("new"), prompt_of(50, 3))
        assert (kept.resident_tokens > 0, gone.resident_tokens) == (True, 0)


async def test_a_newcomer_waits_for_busy_sessions(opened: Opened) -> None:
    """While all memory is held by turns under way a newcomer waits, and they keep what they have;
    those that come after it wait behind it."""
    async with opened(kv_tokens=2 * 64) as play:
        streams = [
            play.flow.session(f"s{i}").generate(prompt_of(40, i), max_new_tokens=5)
            for i in range(2)
        ]
        for stream in streams:
            await anext(stream)
        order: list[int] = []

        async def come(number: int) -> None:
            stream = play.flow.session(f"new{number}").generate(prompt_of(40, 5), max_new_tokens=3)
            made = [await anext(stream)]
            order.append(number)
            assert [*made, *[t async for t in stream]] == cold(prompt_of(40, 5), 3)

        comers = []
        for number in range(3):
            comers.append(asyncio.create_task(come(number)))
            await asyncio.sleep(0.01)
        assert order == []
        for stream in streams:
            assert len([token async for token in stream]) == 4
        await asyncio.gather(*comers)
        assert order == [0, 1, 2]
        assert play.flow.room.waited >= 1


async def test_turns_that_grow_together_give_way_and_come_back(opened: Opened) -> None:
    """Several turns that are more than there is memory for as they grow: each comes to its end,
    with the tokens of a cold run, though some have to be restored in between."""
    async with opened(kv_tokens=5 * 64) as play:
        async with asyncio.timeout(20):
            await asyncio.gather(
                *(play.ask(play.flow.session(f"s{i}"), prompt_of(50, i), 40) for i in range(5))
            )
        assert play.flow.room.waited > 0


async def test_a_history_that_grows_gives_way_and_comes_back(opened: Opened) -> None:
    """A resident session whose new message finds no room waits without what it held."""
    async with opened(kv_tokens=4 * 64) as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(50, 1))
        stream = play.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=3)
        await anext(stream)
        history = [*session.tokens, *prompt_of(100, 3)]
        turn = asyncio.create_task(play.ask(session, history))
        await asyncio.sleep(0.01)
        assert session.resident_tokens == 0
        assert len([token async for token in stream]) == 2
        report = await turn
        assert report.cached_tokens == 48


async def test_memory_that_is_being_given_back_is_waited_for(opened: Opened) -> None:
    """A session that is forgotten holds its memory until what is to be stored is copied."""
    async with opened(kv_tokens=64) as play:
        go = asyncio.Event()

        async def hang() -> None:
            await go.wait()

        play.store.before_lookup = hang
        session = play.flow.session("s")
        await play.ask(session, prompt_of(50, 1))
        forgetting = asyncio.create_task(session.forget())
        await asyncio.sleep(0)
        assert session.resident_tokens == 0
        assert play.engine.open_requests != []
        await play.ask(play.flow.session("new"), prompt_of(50, 2))
        await forgetting
        go.set()


async def test_what_never_fits_is_refused(opened: Opened) -> None:
    """... once nobody else holds any memory, and what waits behind it goes on."""
    async with opened(kv_tokens=2 * 64) as play:
        stream: Any = play.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=3)
        await anext(stream)
        large = asyncio.create_task(play.ask(play.flow.session("large"), prompt_of(200)))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(play.ask(play.flow.session("small"), prompt_of(20)))
        await asyncio.sleep(0.01)
        assert not large.done()
        await stream.aclose()
        with pytest.raises(CapacityError):
            await large
        await small


async def test_closing_ends_the_waiting(opened: Opened) -> None:
    """A turn that waits for memory while CacheFlow is closed is told so; so is one it waits for."""
    async with opened(kv_tokens=64) as play:
        stream = play.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=30)
        await anext(stream)
        waits = asyncio.create_task(play.ask(play.flow.session("s"), prompt_of(50)))
        cancelled = asyncio.create_task(play.ask(play.flow.session("t"), prompt_of(50)))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not waits.done()
    with pytest.raises(ClosedError):
        await waits
    with pytest.raises(ClosedError):
        await anext(stream)


async def test_a_decode_step_makes_room_too(opened: Opened) -> None:
    """A session that grows into another page takes the memory of an idle one."""
    async with opened(kv_tokens=2 * 64) as play:
        idle = play.flow.session("idle")
        await play.ask(idle, prompt_of(50, 1))
        await play.ask(play.flow.session("grows"), prompt_of(60, 2), 10)
        assert idle.resident_tokens == 0


async def test_many_newcomers_at_once(opened: Opened) -> None:
    """Sessions that ask for room at the same time do not wait for each other for ever."""
    async with opened(kv_tokens=8 * 64) as play:
        for i in range(8):
            await play.ask(play.flow.session(f"old{i}"), prompt_of(50, i))
        async with asyncio.timeout(20):
            await asyncio.gather(
                *(play.ask(play.flow.session(f"new{i}"), prompt_of(50, 20 + i)) for i in range(8))
            )


async def test_memory_that_came_free_while_the_engine_was_asked_is_asked_for_again(
    opened: Opened,
) -> None:
    """An engine may take its time to say that there is none: by then the last holder is gone."""
    async with opened(kv_tokens=64) as play:
        stream = play.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=3)
        await anext(stream)
        engine: Any = play.engine
        found_none, go, open_it = asyncio.Event(), asyncio.Event(), engine.open

        async def slow(request_id: str, tokens: list[int]) -> None:
            try:
                await open_it(request_id, tokens)
            except CapacityError:
                found_none.set()
                await go.wait()
                raise

        engine.open = slow
        turn = asyncio.create_task(play.ask(play.flow.session("new"), prompt_of(50, 1)))
        await found_none.wait()
        await stream.aclose()
        await play.flow.session("busy").forget()
        go.set()
        await turn

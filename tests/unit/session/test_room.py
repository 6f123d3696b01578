"""Whose KV leaves memory when there is no room for another's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import CapacityError
from tests.unit.session.conftest import prompt_of

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


async def test_busy_sessions_keep_what_they_have(opened: Opened) -> None:
    """While all memory is held by turns under way a newcomer is refused, and they end well."""
    async with opened(kv_tokens=2 * 64) as play:
        streams = [
            play.flow.session(f"s{i}").generate(prompt_of(40, i), max_new_tokens=5)
            for i in range(2)
        ]
        for stream in streams:
            await anext(stream)
        with pytest.raises(CapacityError):
            await play.ask(play.flow.session("new"), prompt_of(40, 5))
        for stream in streams:
            assert len([token async for token in stream]) == 4
        await play.ask(play.flow.session("new"), prompt_of(40, 5))


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

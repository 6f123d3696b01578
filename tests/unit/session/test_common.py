"""Several flows over one engine, and ids that somebody else has opened there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.session import CacheFlow
from cacheflow.session.common import in_common
from cacheflow.settings import Settings
from cacheflow.testing.serving import ServingEngine
from cacheflow.testing.storage import MemoryBackend
from tests.unit.session.conftest import Held, Play, cold, prompt_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.session.conftest import Opened


@asynccontextmanager
async def beside(tmp_path: Path, engine: ServingEngine, salt: str = "") -> AsyncIterator[Play]:
    """One more flow over ``engine``, with a store of its own."""
    store = MemoryBackend()
    settings = Settings(cache_dir=tmp_path, keep_costs=False, staging_bytes=1 << 20, salt=salt)
    async with CacheFlow.open(settings, engine=engine, backends={"store": store}) as flow:
        yield Play(flow, engine, store)


async def test_sessions_of_one_name_in_several_flows(opened: Opened, tmp_path: Path) -> None:
    """Each has its own prompt in the engine at the same time; none closes or reads another's."""
    async with opened() as first, AsyncExitStack() as stack:
        more = [beside(tmp_path, first.engine, salt) for salt in ("b", "c")]
        plays = [first, *[await stack.enter_async_context(each) for each in more]]
        sessions = [play.flow.session("chat") for play in plays]
        for turn in range(1, 4):
            await asyncio.gather(
                *(
                    play.ask(session, prompt_of(100 * turn, seed))
                    for seed, (play, session) in enumerate(zip(plays, sessions, strict=True))
                )
            )
        requests = [request for session in sessions for request in session.requests]
        assert len(set(requests)) == 3
        assert sorted(requests) == sorted(first.engine.open_requests)
        await sessions[1].close()
        assert sorted(sessions[0].requests + sessions[2].requests) == sorted(
            first.engine.open_requests
        )
        await first.ask(sessions[0], [*sessions[0].tokens, 5])


async def test_a_flow_that_comes_after_one_that_went(opened: Opened, tmp_path: Path) -> None:
    """Ids of a flow that is closed are not those of one that is opened beside others."""
    async with opened() as first:
        async with beside(tmp_path, first.engine) as second:
            await second.ask(second.flow.session("s"), prompt_of(40, 2))
            async with beside(tmp_path, first.engine) as third:
                await third.ask(third.flow.session("s"), prompt_of(40, 3))
        async with beside(tmp_path, first.engine) as fourth:
            await first.ask(first.flow.session("s"), prompt_of(40, 1))
            await fourth.ask(fourth.flow.session("s"), prompt_of(40, 4))
            assert len(first.engine.open_requests) == 2
        assert first.flow.session("s").requests == first.engine.open_requests


async def test_idle_sessions_of_another_flow_make_room(opened: Opened, tmp_path: Path) -> None:
    """... and busy ones are waited for; they find again what they had."""
    async with opened(kv_tokens=2 * 64) as first, beside(tmp_path, first.engine) as second:
        idle = first.flow.session("idle")
        await first.ask(idle, prompt_of(50, 1))
        stream = first.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=3)
        await anext(stream)
        await second.ask(second.flow.session("new"), prompt_of(50, 3))
        assert idle.resident_tokens == 0
        waits = asyncio.create_task(second.ask(second.flow.session("large"), prompt_of(100, 4)))
        await asyncio.sleep(0)
        assert len([token async for token in stream]) == 2
        await waits
        await first.flow.flush()
        assert (await first.ask(idle, prompt_of(50, 1))).cached_tokens == 48


async def test_who_waits_behind_another_flow_ends_with_its_own(
    opened: Opened, tmp_path: Path
) -> None:
    """A flow that closes does not leave a turn to wait for those of others."""
    async with opened(kv_tokens=64) as first:
        stream = first.flow.session("busy").generate(prompt_of(50, 2), max_new_tokens=3)
        await anext(stream)
        ahead = asyncio.create_task(first.ask(first.flow.session("ahead"), prompt_of(50, 3)))
        await asyncio.sleep(0.01)
        async with beside(tmp_path, first.engine) as second:
            behind = asyncio.create_task(second.ask(second.flow.session("s"), prompt_of(50, 4)))
            await asyncio.sleep(0.01)
        with pytest.raises(ClosedError, match="CacheFlow was closed"):
            await behind
        assert not ahead.done()
        assert len([token async for token in stream]) == 2
        await ahead


class Ranked(ServingEngine):
    """Says that it needs others for every layer."""

    peers = None


async def test_an_engine_over_several_ranks_serves_one_flow(tmp_path: Path) -> None:
    """Its ranks are told of one scheduler: a second flow is refused until the first has ended."""
    engine = Ranked()
    with in_common(engine) as only:
        assert only.request("s", 3) == "s/3"
        with pytest.raises(ConfigError, match="several ranks serves one at a time"):
            async with beside(tmp_path, engine):
                pass
    with in_common(engine) as only:
        assert only.request("s", 1) == "s/1"
    await engine.aclose()


async def test_a_flow_of_another_event_loop_is_refused(opened: Opened, tmp_path: Path) -> None:
    """What flows over one engine share is of one loop. A loop after that one is another matter."""

    async def elsewhere(engine: ServingEngine) -> None:
        async with beside(tmp_path, engine) as play:
            await play.ask(play.flow.session("s"), prompt_of(40))

    async with opened() as play:
        await play.ask(play.flow.session("s"), prompt_of(40))
        with pytest.raises(ConfigError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere(play.engine))
    engine = ServingEngine()
    for _ in range(2):
        await asyncio.to_thread(asyncio.run, elsewhere(engine))


async def test_a_loop_that_died_under_its_flow_does_not_lock_the_engine() -> None:
    """What such a flow left open in the engine has ids that the next one does not use."""
    engine = ServingEngine()
    left = in_common(engine)

    async def begins() -> str:
        return left.__enter__().request("s", 1)

    before = await asyncio.to_thread(asyncio.run, begins())
    with in_common(engine) as place:
        assert place.request("s", 1) != before
        with in_common(engine) as other:
            assert other.request("s", 1) not in (before, place.request("s", 1))
    left.__exit__(None, None, None)
    with in_common(engine) as place:
        assert place.request("s", 1) == before


async def test_an_open_that_fails_closes_nothing(opened: Opened) -> None:
    """The id is somebody else's in the engine: that request stays, and the session goes on."""
    async with opened() as play:
        foreign = prompt_of(30, 9)
        for name in ("s/1", "s/4", "t/1"):
            await play.engine.open(name, foreign)
        session = play.flow.session("s")
        with pytest.raises(ValueError, match="'s/1' is already open"):
            await play.ask(session, prompt_of(100, 1))
        assert session.requests == []
        await play.ask(session, prompt_of(100, 1))
        await play.ask(session, prompt_of(100, 2))
        with pytest.raises(ValueError, match="'s/4' is already open"):
            await play.ask(session, prompt_of(100, 3))  # while it holds another prompt's
        await play.ask(session, prompt_of(100, 3))
        with pytest.raises(ValueError, match="'t/1' is already open"):
            await session.fork("t")
        for name in ("s/1", "s/4", "t/1"):
            assert name in play.engine.open_requests
            await play.engine.close(name)


async def test_a_session_forgotten_while_an_open_fails_closes_nothing(opened: Opened) -> None:
    """Nor does it while the engine takes its time to say so."""
    async with opened() as play:
        await play.engine.open("s/1", prompt_of(30, 9))
        held, engine, open_it = Held(), play.engine, play.engine.open

        async def slow(request_id: str, tokens: list[int]) -> None:
            await held.wait()
            await open_it(request_id, tokens)

        engine.open = slow  # type: ignore[method-assign, assignment]
        session = play.flow.session("s")
        turn = asyncio.create_task(play.ask(session, prompt_of(100, 1)))
        await held.began.wait()
        await session.forget()
        held.go.set()
        with pytest.raises((ClosedError, ValueError)):
            await turn
        assert engine.open_requests == ["s/1"]
        await play.ask(session, prompt_of(100, 1))
        await session.close()
        assert engine.open_requests == ["s/1"]
        await engine.close("s/1")


async def test_no_room_for_another_prompt_costs_the_session_nothing(opened: Opened) -> None:
    """An open that finds no memory closes what is in the way, and nothing twice."""
    async with opened(kv_tokens=256) as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(100, 1))
        with pytest.raises(CapacityError):
            await play.ask(session, prompt_of(300, 2))
        assert play.engine.open_requests == session.requests
        await play.ask(session, prompt_of(100, 3))


async def test_priorities_of_a_known_session(opened: Opened) -> None:
    """They are checked as those of a new one, and 0 is one; a bad one changes nothing."""
    async with opened() as play:
        session = play.flow.session("s", priority=3)
        assert play.flow.session("s") is session
        assert session.priority == 3
        for options in ({"priority": "high"}, {"priority": 1.5}, {"ttl": 5, "priority": "high"}):
            with pytest.raises(ConfigError, match="priority must be a whole number"):
                play.flow.session("s", **options)
        assert (session.priority, session.ttl) == (3, None)
        play.flow.session("s", priority=0)
        assert session.priority == 0
        await play.ask(session, prompt_of(20))


async def test_after_cacheflow_is_closed(opened: Opened, tmp_path: Path) -> None:
    """What would begin something says so."""
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(20))
    for call in (
        anext(session.generate(prompt_of(20), max_new_tokens=1)),
        session.prefetch(prompt_of(20)),
        session.fork(),
        session.truncate(1),
        play.flow.import_session(tmp_path),
        anext(play.flow.session("new").generate(prompt_of(20))),
    ):
        with pytest.raises(ClosedError, match="CacheFlow is closed"):
            await call
    assert session.tokens[20:] == tuple(cold(prompt_of(20), 3))

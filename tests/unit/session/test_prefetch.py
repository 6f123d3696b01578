"""Restores without a turn: joined, overtaken, cancelled, and what they leave for the turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.session import Generation
from tests.unit.session.conftest import Held, prompt_of

if TYPE_CHECKING:
    from cacheflow.session import Session
    from tests.unit.session.conftest import Opened, Play

PROMPT = prompt_of(300)


async def stored(play: Play) -> Session:
    """A session whose history is stored and not in memory."""
    session = play.flow.session("s")
    await play.ask(session, PROMPT)
    await play.flow.flush()
    await session.forget()
    return session


async def begun(
    play: Play, session: Session, priority: int | None = None
) -> tuple[Held, asyncio.Task[None]]:
    """A prefetch whose reads wait until they are let go."""
    held = Held()
    play.store.before_read = held.wait
    prefetch = asyncio.create_task(session.prefetch(policy="load", priority=priority))
    await held.began.wait()
    return held, prefetch


def looking(play: Play) -> Held:
    """Lookups wait until they are let go."""
    held = Held()
    play.store.before_lookup = held.wait
    return held


def admissions(play: Play) -> asyncio.Queue[Any]:
    """What the scheduler is given from now on, in order."""
    specs: asyncio.Queue[Any] = asyncio.Queue()
    scheduler: Any = play.flow.restorer.scheduler
    admit = scheduler.admit

    def watched(spec: Any, *arguments: Any, **options: Any) -> None:
        admit(spec, *arguments, **options)
        specs.put_nowait(spec)

    scheduler.admit = watched
    return specs


async def test_the_turn_after_a_prefetch_restores_nothing(opened: Opened) -> None:
    """The history is in memory, as far as its KV can be; only what is new is computed."""
    async with opened() as play:
        session, report = await stored(play), Generation()
        await session.prefetch(report=report)
        assert report.restoration is not None
        assert report.restoration.prefix_tokens == 288
        assert session.resident_tokens == 303
        reads, computed = play.store.reads, play.engine.recomputed
        turn = await play.ask(session, [*session.tokens, *prompt_of(20, 1)])
        assert turn.usage.resident_tokens == 303
        assert play.store.reads == reads
        assert play.engine.recomputed - computed <= 2 * play.engine.layout.num_layers
        await session.prefetch()
        assert play.store.reads == reads


async def test_a_turn_joins_a_prefetch(opened: Opened) -> None:
    """It waits for what is under way, which it lends its priority; nothing is read twice."""
    async with opened() as play:
        session = await stored(play)
        published = play.engine.published
        held, prefetch = await begun(play, session, priority=-5)
        history = [*session.tokens, *prompt_of(20, 1)]
        turn = asyncio.create_task(play.ask(session, history))
        await asyncio.sleep(0)
        spec = play.flow.restorer.scheduler._requests[session.requests[0]].spec
        assert spec.priority == 0
        held.go.set()
        report = await turn
        await prefetch
        assert report.usage.loaded_tokens == 288
        assert play.engine.published - published == 18 * play.engine.layout.num_layers


async def test_what_a_joining_turn_adds_is_part_of_the_restore(opened: Opened) -> None:
    """Its new tokens are one suffix with what the prefetch had to compute, which begins under the
    last loads as in any restore, and the turn restores nothing itself."""
    async with opened() as play:
        session, report = await stored(play), Generation()
        held, prefetch = await begun(play, session)
        history = [*session.tokens, *prompt_of(20, 1)]
        turn = asyncio.create_task(play.ask(session, history, report=report))
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(prefetch, turn)
        assert report.restoration is not None
        assert report.restoration.suffix_tokens == 323 - 288
        pieces = play.engine.segments(session.requests[0])
        assert (288, 323) in {(piece.start, piece.stop) for piece in pieces}
        assert session.requests == ["s/2"]


@pytest.mark.parametrize("held_in", ["lookup", "read"])
@pytest.mark.parametrize("prefetched", [300, 303, 304, 305])
@pytest.mark.parametrize("new", [1, 17, 200])
async def test_a_turn_joins_wherever_the_prompts_end(
    opened: Opened, held_in: str, prefetched: int, new: int
) -> None:
    """In the middle of a chunk, of a tile, or at the end of one; while tiers are asked or read."""
    async with opened() as play:
        session, held = await stored(play), Held()
        prompt = [*session.tokens, *prompt_of(250, 3)]
        setattr(play.store, f"before_{held_in}", held.wait)
        prefetch = asyncio.create_task(session.prefetch(prompt[:prefetched]))
        await held.began.wait()
        turn = asyncio.create_task(play.ask(session, prompt[: prefetched + new]))
        await asyncio.sleep(0)
        held.go.set()
        report = (await asyncio.gather(prefetch, turn))[1]
        assert report.cached_tokens == 288
        await play.ask(session, [*session.tokens, 5])


async def test_a_turn_that_joins_too_late_or_without_room(opened: Opened) -> None:
    """It waits for the prefetch and goes on from what that has restored."""
    async with opened(kv_tokens=384) as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        long = asyncio.create_task(play.ask(session, [*session.tokens, *prompt_of(200, 1)]))
        await asyncio.sleep(0)
        held.go.set()
        await prefetch
        with pytest.raises(CapacityError):
            await long
        report = await play.ask(session, [*session.tokens, 5])
        assert report.usage.resident_tokens == 303


async def test_a_turn_that_joined_and_left(opened: Opened) -> None:
    """What it had added is restored, and in nobody's way: another turn says what it should."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        turn = asyncio.create_task(play.ask(session, [*session.tokens, *prompt_of(20, 1)]))
        await asyncio.sleep(0)
        turn.cancel()
        held.go.set()
        await prefetch
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert session.resident_tokens == 323
        report = await play.ask(session, [*session.tokens, *prompt_of(20, 2)])
        assert report.usage.resident_tokens == 303


async def test_a_joined_prefetch_that_is_cancelled(opened: Opened) -> None:
    """The turn restores for itself."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        turn = asyncio.create_task(play.ask(session, [*session.tokens, *prompt_of(20, 1)]))
        await asyncio.sleep(0)
        prefetch.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await prefetch
        assert (await turn).cached_tokens == 288


async def test_a_turn_joins_a_prefetch_that_is_still_looking(opened: Opened) -> None:
    """While the tiers are being asked the restore takes the turn's priority, too."""
    async with opened() as play:
        session = await stored(play)
        held, specs = looking(play), admissions(play)
        prefetch = asyncio.create_task(session.prefetch(policy="load"))
        await held.began.wait()
        turn = asyncio.create_task(play.ask(session, [*session.tokens, 5], priority=7))
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(prefetch, turn)
        assert [(await specs.get()).priority] == [7]
        assert specs.empty()


async def test_a_turn_joins_a_prefetch_whose_store_does_not_answer(opened: Opened) -> None:
    """Nothing is known of what is stored when the restore begins: all of the longer prompt is
    computed nevertheless, its last token above all."""
    async with opened() as play:
        session = await stored(play)
        held, specs = looking(play), admissions(play)
        prefetch = asyncio.create_task(session.prefetch(policy="adaptive"))
        await held.began.wait()
        prompt = [*session.tokens, *prompt_of(20, 1)]
        turn = asyncio.create_task(play.ask(session, prompt))
        spec = await specs.get()  # although nobody has answered
        held.go.set()
        await asyncio.gather(prefetch, turn)
        assert specs.empty()
        assert spec.total_tokens == len(prompt)
        assert spec.suffix[-1].stop == len(prompt)


async def test_a_turn_with_another_prompt_ends_a_prefetch(opened: Opened) -> None:
    """Whoever waits for the prefetch is told nothing: it was advice."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        await play.ask(session, prompt_of(50, 7))
        await prefetch
        held.go.set()
        assert session.resident_tokens == 52


async def test_a_turn_that_differs_late_joins_too(opened: Opened) -> None:
    """What was prefetched too much is rewound."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        turn = asyncio.create_task(play.ask(session, [*PROMPT[:290], *prompt_of(30, 9)]))
        await asyncio.sleep(0)
        held.go.set()
        await prefetch
        assert (await turn).usage.resident_tokens == 290


async def test_a_cancelled_prefetch_leaves_the_session_usable(opened: Opened) -> None:
    """The cancellation is the caller's; the next turn restores."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        prefetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefetch
        held.go.set()
        report = await play.ask(session, PROMPT)
        assert report.cached_tokens == 288


async def test_a_prefetch_of_a_prompt_stores_what_is_new(opened: Opened) -> None:
    """A prompt that nobody has computed yet is prefilled, and stored."""
    async with opened() as play:
        session = play.flow.session("s")
        await session.prefetch(PROMPT)
        await play.flow.flush()
        assert len(play.store.objects) == 18
        report = await play.ask(session, [*PROMPT, 5])
        assert report.usage.resident_tokens == 300


async def test_what_cannot_be_prefetched(opened: Opened) -> None:
    """A session without a history, a prompt that is none, a closed session."""
    async with opened() as play:
        session = play.flow.session("s")
        await session.prefetch()
        assert session.resident_tokens == 0
        with pytest.raises(ConfigError, match="empty"):
            await session.prefetch([])
        with pytest.raises(ConfigError, match="position 0"):
            await session.prefetch([-1])
        await session.close()
        with pytest.raises(ClosedError):
            await session.prefetch(PROMPT)


async def test_forgotten_during_a_prefetch(opened: Opened) -> None:
    """Whoever waits for it is told; nothing stays in memory."""
    async with opened() as play:
        session = await stored(play)
        held, prefetch = await begun(play, session)
        await session.forget()
        held.go.set()
        with pytest.raises(ClosedError, match="session 's' was forgotten"):
            await prefetch
        assert play.engine.open_requests == []


async def test_what_a_session_restores_anew_is_not_copied_before_it_is_there(
    opened: Opened,
) -> None:
    """A session that has another prompt in memory restores one that is stored: a third one, which
    begins like both, copies what is complete, or waits for what is not."""
    async with opened() as play:
        stem, first = prompt_of(140), play.flow.session("first")
        other = [*stem[:104], *prompt_of(150, 1)]
        await play.ask(first, other)
        await play.flow.flush()
        await first.forget()
        await play.ask(first, stem, policy="recompute", save=False)
        held = Held()
        play.store.before_read = held.wait
        # What it has of ``stem`` beyond ``other`` stays as it is until its whole tiles are shared.
        turn = asyncio.create_task(play.ask(first, other, policy="load"))
        await held.began.wait()
        prompt = [*stem[:100], *prompt_of(5, 2)]
        third = asyncio.create_task(play.ask(play.flow.session("third"), prompt))
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(turn, third)

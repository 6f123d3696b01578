"""Turns of one session: what they go on from, what survives a broken one, what is refused."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.session import Generation
from tests.unit.session.conftest import cold, prompt_of

if TYPE_CHECKING:
    from cacheflow.types import Read, TileWork
    from tests.unit.session.conftest import Opened


async def test_a_turn_goes_on_from_the_last(opened: Opened) -> None:
    """History and report of two turns: what was in memory is resident, and nothing is read."""
    async with opened() as play:
        session = play.flow.session("s")
        first = await play.ask(session, prompt_of(100))
        assert first.usage.prompt_tokens == 100
        assert first.usage.completion_tokens == 3
        assert first.cached_tokens == 0
        assert "cached_tokens=0" in repr(first.usage)
        assert session.tokens == (*prompt_of(100), *cold(prompt_of(100), 3))
        assert session.resident_tokens == 102
        history = [*session.tokens, *prompt_of(50, 1)]
        second = await play.ask(session, history)
        assert second.usage.resident_tokens == second.cached_tokens == 102
        assert second.usage.total_tokens == 153 + 3
        assert "resident_tokens=102, " in repr(second.usage)
        assert "cached_tokens=102, " in repr(second.usage)
        assert play.store.reads == 0


async def test_what_diverges_late_is_rewound(opened: Opened) -> None:
    """The same prompt again, or one that differs at its end, keeps all tokens before that."""
    async with opened() as play:
        session = play.flow.session("s")
        prompt = prompt_of(150)
        await play.ask(session, prompt)
        again = await play.ask(session, prompt)
        assert again.usage.resident_tokens == 149
        assert session.divergence([*prompt[:120], 7, *prompt_of(30, 2)]) == 120
        assert session.divergence(prompt) is None
        assert session.divergence([*session.tokens, 5]) is None
        other = await play.ask(session, [*prompt[:120], 7, *prompt_of(30, 2)])
        assert other.usage.resident_tokens == 120
        shorter = await play.ask(session, prompt[:60])
        assert shorter.usage.resident_tokens == 59


async def test_what_diverges_early_keeps_whole_tiles(opened: Opened) -> None:
    """A long new part might be stored: it is looked up, and the tiles before it are shared."""
    async with opened() as play:
        session = play.flow.session("s")
        common, first, second = prompt_of(70), prompt_of(200, 1), prompt_of(200, 2)
        await play.ask(session, [*common, *first])
        await play.ask(session, [*common, *second])
        await play.flow.flush()
        report = await play.ask(session, [*common, *first])
        assert report.usage.resident_tokens == 64
        assert report.usage.cached_tokens == 256
        assert len(play.engine.open_requests) == 1


async def test_usage_adds_up(opened: Opened) -> None:
    """Loaded and recomputed parts of a restored prompt are what was cached."""
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(300))
        await play.flow.flush()
        for policy in ("load", "adaptive"):
            await session.forget()
            usage = (await play.ask(session, prompt_of(300), policy=policy)).usage
            assert usage.cached_tokens == 288
            assert usage.resident_tokens == 0
            assert policy == "adaptive" or usage.loaded_tokens == 288


async def test_a_hit_larger_than_staging_memory_is_whole(opened: Opened) -> None:
    """It comes piece by piece: of a MiB through a third of one nothing is left out, and nothing
    looks like a shorter hit."""
    prompt = prompt_of(1025)
    async with opened(staging_bytes=1 << 20) as play:
        session = play.flow.session("s")
        await play.ask(session, prompt)
        await play.flow.flush(60)
        assert sum(map(len, play.store.objects.values())) > 1 << 20
        for policy in ("load", "adaptive"):
            await session.forget()
            usage = (await play.ask(session, prompt, policy=policy)).usage
            assert usage.cached_tokens == 1024
            assert policy == "adaptive" or usage.loaded_tokens == 1024


async def test_it_stops_at_a_stop_token(opened: Opened) -> None:
    """The stop token is the last one, and the reason says so."""
    async with opened() as play:
        expected, report = cold(prompt_of(40), 9), Generation()
        stream = play.flow.session("s").generate(
            prompt_of(40), max_new_tokens=9, stop_tokens=[expected[4]], report=report
        )
        assert [token async for token in stream] == expected[:5]
        assert report.finish_reason == "stop"
        assert report.usage.completion_tokens == 5


async def test_a_turn_cancelled_while_it_decodes_keeps_what_is_complete(opened: Opened) -> None:
    """Cancelled before, and in, a decode step: the KV up to the last complete step stays, is
    stored, and the next turn goes on from there."""
    async with opened() as play:
        session, prompt, report = play.flow.session("s"), prompt_of(100), Generation()
        made: list[int] = []
        in_step, go = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            in_step.set()
            await go.wait()

        async def work() -> None:
            async for token in session.generate(prompt, max_new_tokens=50, report=report):
                made.append(token)
                if len(made) == 8:
                    play.engine.before_step = hold

        task = asyncio.create_task(work())
        await in_step.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "the step it is in is waited for"
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert report.finish_reason == "cancelled"
        assert made == cold(prompt, 8)
        assert session.resident_tokens == 108
        assert session.tokens == (*prompt, *made)
        assert report.saved is not None
        await play.flow.flush()
        assert report.saved["store"].stored == 108 // 16
        again = await play.ask(session, [*session.tokens, *prompt_of(20, 3)])
        assert again.usage.resident_tokens == 108


async def test_a_turn_cancelled_in_its_suffix_keeps_what_was_there(opened: Opened) -> None:
    """A long new message is cancelled while it is computed: the pieces that are complete stay."""
    async with opened() as play:
        session, reached, go = play.flow.session("s"), asyncio.Event(), threading.Event()
        await play.ask(session, prompt_of(100))
        loop = asyncio.get_running_loop()

        def stop_at(work: TileWork, layer: int) -> None:
            if work.tile.start >= 256:
                loop.call_soon_threadsafe(reached.set)
                assert go.wait(10)

        play.engine.before_layer = stop_at
        history = [*session.tokens, *prompt_of(500, 1)]
        task = asyncio.create_task(play.ask(session, history))
        await reached.wait()
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert play.flow.restorer.scheduler._requests[session.requests[0]].cancelled
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.resident_tokens == 256
        report = await play.ask(session, history)
        assert report.usage.resident_tokens == 256


async def test_a_cancelled_restore_keeps_its_whole_tiles(opened: Opened) -> None:
    """What a restore had ready from the first token on is not restored again by the next turn,
    which looks up the rest."""
    async with opened() as play:
        session, reached, go = play.flow.session("s"), asyncio.Event(), threading.Event()
        prompt = prompt_of(600)
        await play.ask(session, prompt)
        await play.flow.flush()
        await session.forget()
        loop = asyncio.get_running_loop()

        def stop_at(work: TileWork, layer: int) -> None:
            if work.tile.start >= 256:
                loop.call_soon_threadsafe(reached.set)
                assert go.wait(10)

        async def hold(read: Read) -> None:
            await asyncio.Event().wait()

        play.engine.before_layer, play.store.before_read = stop_at, hold
        task = asyncio.create_task(play.ask(session, prompt))
        await reached.wait()
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.resident_tokens == 256
        play.store.before_read = None
        blocks = play.engine.published + play.engine.recomputed
        report = await play.ask(session, prompt)
        assert report.usage.resident_tokens == 256
        assert report.usage.cached_tokens == 592
        layers = play.engine.layout.num_layers
        assert play.engine.published + play.engine.recomputed - blocks <= (592 - 256) // 16 * layers
        assert len(play.engine.open_requests) == 1


async def test_forgotten_during_a_turn(opened: Opened) -> None:
    """The turn ends and says why; the session works again."""
    async with opened() as play:
        session = play.flow.session("s")
        stream = session.generate(prompt_of(40), max_new_tokens=20)
        await anext(stream)
        await session.forget()
        with pytest.raises(ClosedError, match=r"session 's' was forgotten"):
            await anext(stream)
        assert session.resident_tokens == 0
        await play.ask(session, prompt_of(40))


async def test_closed_during_a_turn(opened: Opened) -> None:
    """The turn ends, the session is not to be used again, its name is."""
    async with opened() as play:
        session = play.flow.session("s")
        stream = session.generate(prompt_of(40), max_new_tokens=20)
        await anext(stream)
        await session.close()
        with pytest.raises(ClosedError, match=r"session 's' was forgotten, or closed"):
            await anext(stream)
        with pytest.raises(ClosedError, match="is closed"):
            await play.ask(session, prompt_of(40))
        await play.ask(play.flow.session("s"), prompt_of(40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "NoneType"),
        ({"prompt": "hello"}, "str"),
        ({"prompt": 5}, "int"),
        ({"prompt": {1, 2}}, "set"),
        ({"prompt": {"role": "user", "content": "hi"}}, "list of messages"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, "x"]}, "position 1"),
        ({"prompt": [1, None]}, "position 1"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "no chat template"),
        ({"prompt": [{"content": "hi"}]}, "message 0 of the prompt has no role: give 'system'"),
        ({"prompt": [{"role": "user", "content": "hi"}, {"role": None}]}, "message 1 .* no role"),
        ({"prompt": [{"role": "user", "content": "hi"}, "hi"]}, "message 1 of the prompt is str"),
        ({"prompt": [1], "tools": [{"name": "t"}]}, "tools go with messages"),
        ({"prompt": [1], "max_new_tokens": 2.5}, "max_new_tokens"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": [1], "max_new_tokens": None}, "max_new_tokens"),
        ({"prompt": [1], "stop_tokens": None}, "stop_tokens"),
        ({"prompt": [1], "stop_tokens": ["</s>"]}, "stop_tokens"),
        ({"prompt": [1], "stop_tokens": [-5]}, "stop_tokens"),
        ({"prompt": [1], "deadline": float("nan")}, "deadline"),
        ({"prompt": [1], "deadline": "soon"}, "deadline"),
        ({"prompt": [1], "priority": "high"}, "priority"),
        ({"prompt": [1], "policy": "best"}, "policy"),
        ({"prompt": [1], "policy": ""}, "policy"),
        ({"prompt": [1], "policy": []}, "policy"),
        ({"prompt": [1], "max_new_tokens": 100_001}, "do not fit .* to at most 100000$"),
        ({"prompt": [1] * 100_001}, "do not fit .*: shorten the prompt"),
    ],
)
async def test_bad_arguments(opened: Opened, arguments: dict[str, Any], message: str) -> None:
    """Each is named, before anything is opened, and costs the session nothing."""
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(40))
        with pytest.raises(ConfigError, match=message):
            await anext(session.generate(**arguments))
        assert session.resident_tokens == 42


async def test_bad_sessions_and_times(opened: Opened) -> None:
    """Names, tenants, times and lengths that cannot be are refused by name."""
    async with opened() as play:
        flow: Any = play.flow
        for arguments, message in (
            (("",), "id"),
            ((5,), "id"),
        ):
            with pytest.raises(ConfigError, match=message):
                flow.session(*arguments)
        for options, message in (
            ({"tenant": 5}, "tenant"),
            ({"tenant": []}, "tenant"),
            ({"ttl": -1}, "ttl"),
            ({"ttl": float("nan")}, "ttl"),
            ({"priority": 1.5}, "priority"),
        ):
            with pytest.raises(ConfigError, match=message):
                flow.session("s", **options)
        for timeout in (float("nan"), -1, "1"):
            with pytest.raises(ConfigError, match="timeout"):
                await flow.flush(timeout)
        session = flow.session("s")
        for call, message in (
            (session.truncate(1), "has 0 tokens"),
            (session.truncate(1.5), "to truncate to must be a whole number"),
            (session.truncate(-1), "to truncate to must be at least 0, got -1"),
            (session.hint("asleep"), "asleep"),
            (session.hint(priority=0), "priority"),
            (session.hint(eta=float("nan")), "eta"),
            (session.export("a\0b"), "NUL|null"),
            (session.export(None), "path must be a folder's path, got None"),
            (flow.import_session(5), "path must be a folder's path, got 5"),
            (session.prefetch([1], report=3), "report must be a Generation, got int"),
            (anext(session.generate([1], report={})), "report must be a Generation, got dict"),
            (anext(session.generate([1], sampling=3)), "sampling must be a Sampling, got 3"),
            (flow.import_session("a\0b"), "NUL|null"),
        ):
            with pytest.raises(ConfigError, match=message):
                await call


async def test_no_memory_for_a_prompt_costs_the_session_nothing(opened: Opened) -> None:
    """What was in memory is there still when there is no room for more."""
    async with opened(kv_tokens=384) as play:
        session = play.flow.session("s")
        await play.ask(session, prompt_of(100))
        with pytest.raises(CapacityError):
            await play.ask(session, [*session.tokens, *prompt_of(300, 1)])
        assert session.resident_tokens == 102
        report = await play.ask(session, [*session.tokens, *prompt_of(50, 1)])
        assert report.usage.resident_tokens == 102


async def test_an_arriving_turn_waits_for_the_one_before(opened: Opened) -> None:
    """Two turns of one session at once go one after another."""
    async with opened() as play:
        session = play.flow.session("s")
        await asyncio.gather(*(play.ask(session, prompt_of(60, seed)) for seed in range(4)))


async def test_an_engine_that_raises_in_the_middle_of_a_suffix_is_heard(opened: Opened) -> None:
    """Its own error ends the turn: the hidden state that it lost is not asked for."""
    async with opened() as play:

        def burns(work: TileWork, layer: int) -> None:
            if work.is_suffix and layer == 2:
                raise RuntimeError("burnt")

        before, play.engine.before_layer = play.engine.before_layer, burns
        session = play.flow.session("s")
        with pytest.raises(RuntimeError, match="burnt"):
            await play.ask(session, prompt_of(20))
        play.engine.before_layer = before
        await play.ask(session, prompt_of(20))

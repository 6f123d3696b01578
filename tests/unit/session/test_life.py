"""Forks, cuts, ends, tenants, and advice that reaches the tiers."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ClosedError, ConfigError
from cacheflow.kv import tenant_id, tenant_salt
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.tier import Tier
from tests.unit.session.conftest import Held, cold, prompt_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from cacheflow.types import ChunkKey
    from tests.unit.session.conftest import Opened

PROMPT = prompt_of(150)


class Advised(MemoryBackend):
    """Remembers the advice it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[tuple[set[ChunkKey], float, float]] = []
        self.pins: list[tuple[set[ChunkKey], float]] = []

    def hint(self, keys: Any, priority: float, ttl: float) -> None:
        self.hints.append((set(keys), priority, ttl))

    def pin(self, keys: Any, ttl: float) -> int:
        self.pins.append((set(keys), ttl))
        return 0


async def test_forks_share_pages_and_go_their_own_ways(opened: Opened) -> None:
    """Eight branches hold the whole pages once, and each says what a cold run says."""
    async with opened() as play:
        root = play.flow.session("root")
        await play.ask(root, PROMPT)
        used, computed = play.engine.kv_used_tokens, play.engine.recomputed
        forks = [await root.fork() for _ in range(8)]
        assert play.engine.kv_used_tokens == used + 8 * 128
        assert len({fork.id for fork in forks}) == 8
        reports = await asyncio.gather(
            *(play.ask(f, [*f.tokens, *prompt_of(9, i)]) for i, f in enumerate(forks))
        )
        assert [report.usage.resident_tokens for report in reports] == [152] * 8
        assert play.store.reads == 0
        assert play.engine.recomputed - computed <= 8 * 2 * play.engine.layout.num_layers
        await root.close()
        await play.ask(forks[3], [*forks[3].tokens, 5])
        for fork in forks:
            await fork.close()
        assert play.engine.open_requests == []


async def test_forks_of_what_is_stored_restore_it_once(opened: Opened) -> None:
    """A session that is not in memory is forked by its history; the branches, all at once, load or
    recompute the whole tiles once together."""
    async with opened() as play:
        root, prompt = play.flow.session("root"), prompt_of(384)
        await play.ask(root, prompt)
        await play.flow.flush()
        await root.forget()
        forks = [await root.fork(f"branch {i}") for i in range(8)]
        published, computed = play.engine.published, play.engine.recomputed
        prompts = [[*prompt, *prompt_of(9, i)] for i in range(8)]
        await asyncio.gather(*(play.ask(f, p) for f, p in zip(forks, prompts, strict=True)))
        blocks = play.engine.published - published + play.engine.recomputed - computed
        assert blocks == 384 // 16 * play.engine.layout.num_layers


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_tile_in_which_forks_part_is_restored_once(opened: Opened, at_once: bool) -> None:
    """One branch restores the beginning of that tile, too, and the others copy it; whether they
    come at the same moment or a moment later."""
    async with opened() as play:
        root, prompt = play.flow.session("root"), prompt_of(384 + 64)
        await play.ask(root, prompt)
        await play.flow.flush()
        await root.forget()
        forks = [await root.fork(f"branch {i}") for i in range(8)]
        published, computed = play.engine.published, play.engine.recomputed
        prompts = [[*root.tokens, *prompt_of(9, i)] for i in range(8)]
        turns = [play.ask(f, p) for f, p in zip(forks, prompts, strict=True)]
        if at_once:
            reports = await asyncio.gather(*turns)
        else:
            reports = [await turn for turn in turns]
        blocks = play.engine.published - published + play.engine.recomputed - computed
        assert blocks == (384 + 64) // 16 * play.engine.layout.num_layers
        assert [r.cached_tokens for r in reports] == [448] * 8
        assert sum(r.usage.resident_tokens for r in reports) == 7 * 448


async def test_a_fork_whose_restoring_sibling_goes_restores_for_itself(opened: Opened) -> None:
    """Cancelled, or forgotten, in the middle: whoever waited for it goes on."""
    async with opened() as play:
        root, held = play.flow.session("root"), Held()
        await play.ask(root, prompt_of(384 + 64))
        await play.flow.flush()
        await root.forget()
        forks = [await root.fork(f"branch {i}") for i in range(3)]
        play.store.before_read = held.wait
        prompts = [[*root.tokens, *prompt_of(9, i)] for i in range(3)]
        turns = [
            asyncio.create_task(play.ask(f, p, policy="adaptive" if i else "load"))
            for i, (f, p) in enumerate(zip(forks, prompts, strict=True))
        ]
        await held.began.wait()
        await asyncio.sleep(0)
        turns[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await turns[0]
        held.go.set()
        for turn in turns[1:]:
            assert (await turn).cached_tokens == 448


async def test_a_fork_with_a_stored_history_of_its_own_restores_all_of_it(opened: Opened) -> None:
    """What a sibling has is not worth more than what only this one has stored."""
    async with opened() as play:
        root = play.flow.session("root")
        await play.ask(root, prompt_of(384 + 64))
        fork = await root.fork("branch")
        await play.ask(fork, [*fork.tokens, *prompt_of(40, 1)])
        await play.flow.flush()
        await fork.forget()
        await root.forget()
        await play.ask(root, [*root.tokens, 5])
        report = await play.ask(fork, [*fork.tokens, 5])
        assert report.cached_tokens == 480


async def test_a_fork_of_a_known_name_is_refused(opened: Opened) -> None:
    """... and the session that has it is left alone."""
    async with opened() as play:
        root, other = play.flow.session("root"), play.flow.session("other")
        await play.ask(root, PROMPT)
        with pytest.raises(ConfigError, match="'other' already"):
            await root.fork("other")
        assert other.tokens == ()


async def test_truncate(opened: Opened) -> None:
    """A history is cut anywhere, shared pages are left to those that share them."""
    async with opened() as play:
        root = play.flow.session("root")
        await play.ask(root, PROMPT)
        fork = await root.fork()
        await root.truncate(100)
        assert (root.tokens, root.resident_tokens) == (tuple(PROMPT[:100]), 100)
        report = await play.ask(root, [*PROMPT[:100], *prompt_of(60, 1)])
        assert report.usage.resident_tokens == 100
        await play.ask(fork, [*fork.tokens, 5])
        await fork.truncate(0)
        assert (fork.tokens, fork.resident_tokens) == ((), 0)
        with pytest.raises(ConfigError, match="has 0 tokens, not 1"):
            await fork.truncate(1)


async def test_what_was_to_be_stored_is_stored_before_a_cut(opened: Opened) -> None:
    """Chunks that wait when the history is cut are copied first: a later session finds them."""
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        await session.truncate(20)
        await play.flow.flush()
        assert all(await play.store.lookup(play.flow.keys(PROMPT)))
        report = await play.ask(play.flow.session("t"), PROMPT)
        assert report.cached_tokens == 144


async def test_a_tenant_is_called_by_text(opened: Opened) -> None:
    """Half of a surrogate pair is none, and makes no key."""
    async with opened() as play:
        with pytest.raises(ConfigError, match="tenant"):
            play.flow.session("s", tenant="\ud800")


async def test_tenants_share_nothing(opened: Opened) -> None:
    """Not in memory, not in a tier, not by name; each under a salt of its own."""
    async with opened(salt="operator") as play:
        names = ("", "alice", "bob")
        for name in names:
            report = await play.ask(play.flow.session("s", tenant=name), PROMPT)
            assert report.cached_tokens == 0
        await play.flow.flush()
        expected = {tenant_id(tenant_salt(b"operator", name)) for name in names}
        assert expected == {info.tenant_id async for info in play.store.scan()}
        assert tenant_id(b"operator") in expected
        await play.flow.forget()
        for name in names:
            session = play.flow.session("s", tenant=name)
            assert session.tenant == name
            assert (await play.ask(session, PROMPT)).cached_tokens == 144
        fork = await play.flow.session("s", tenant="bob").fork()
        assert fork.tenant == "bob"


async def test_a_session_ends_when_its_time_is_over(opened: Opened) -> None:
    """Without use for its time a session is closed, though nobody holds it; use renews it."""
    async with opened() as play:
        closed = asyncio.Event()
        session = play.flow.session("s", ttl=0.05)
        end: Any = session.close

        async def watched() -> None:
            await end()
            closed.set()

        session.close = watched  # type: ignore[method-assign]
        await play.ask(session, PROMPT)
        async with asyncio.timeout(10):
            await closed.wait()
        assert play.engine.open_requests == []
        with pytest.raises(ClosedError):
            await play.ask(session, PROMPT)
        assert play.flow.session("s") is not session


async def test_a_mortal_session_closed_in_its_turn_is_buried_once(opened: Opened) -> None:
    """Whoever ends first, the loop is not kept busy with a session that is closed already."""
    async with opened() as play:
        session = play.flow.session("s", ttl=0.01)
        stream = session.generate(PROMPT, max_new_tokens=50)
        await anext(stream)
        await session.close()
        with pytest.raises(ClosedError):
            await anext(stream)
        async with asyncio.timeout(10):
            await play.ask(play.flow.session("other", ttl=600), PROMPT, 20)
        assert play.flow._background._mortal == {play.flow.session("other")}


async def test_a_session_with_a_time_to_live_stays_known(opened: Opened) -> None:
    """Its history is there though nobody holds it and its KV has gone."""
    async with opened() as play:
        await play.ask(play.flow.session("s", ttl=600), PROMPT)
        await play.flow.forget()
        gc.collect()
        assert play.flow.session("s").tokens[:150] == tuple(PROMPT)
        assert play.flow.session("s", priority=3).priority == 3


async def test_hints_reach_the_tiers_when_the_chunks_are_there(opened: Opened) -> None:
    """At once, and again when what was still to be stored is stored; a session that is waited for
    is pinned until it is due."""
    store = Advised()
    async with opened(backends={"store": store}) as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        await session.hint("waiting", eta=30.0)
        keys = set(play.flow.keys(PROMPT))
        assert store.hints == [(keys, 4.0, 600.0)]
        assert store.pins == [(keys, 30.0)]
        await play.flow.flush()
        for _ in range(5):
            await asyncio.sleep(0)
        assert store.hints == [(keys, 4.0, 600.0)] * 2
        await session.hint(priority=0.5, ttl=60.0)
        assert store.hints[-1] == (keys, 0.5, 60.0)
        assert len(store.pins) == 2


async def test_closing_lets_go_of_what_no_other_session_has(opened: Opened) -> None:
    """Chunks that another session has as well are not talked down, and nothing is deleted."""
    store = Advised()
    async with opened(backends={"store": store}) as play:
        one, other = play.flow.session("one"), play.flow.session("other")
        await play.ask(one, PROMPT)
        await play.ask(other, [*PROMPT[:80], *prompt_of(60, 1)])
        await play.flow.flush()
        stored = dict(store.objects)
        await one.close()
        await one.close()
        keys = play.flow.keys(PROMPT)
        assert store.hints == [(set(keys[5:]), 0.25, 600.0)]
        assert store.objects == stored


async def test_hints_reach_a_tier_behind_its_codec(opened: Opened, tmp_path: Path) -> None:
    """The tiers of the settings heed them, encoded or not."""
    tiers = [
        {"name": name, "backend": "dram", "codec": codec, "pin_bytes": 1 << 20}
        for name, codec in (("raw", "raw"), ("packed", "zstd"))
    ]
    async with opened(tiers=tiers, staging_bytes=1 << 22) as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        await play.flow.flush()
        await session.hint("waiting", eta=60.0, priority=7.0)
        for backend in play.flow.backends.values():
            tier: Any = backend if isinstance(backend, Tier) else backend.inner  # type: ignore[attr-defined]
            entries = [e for key in play.flow.keys(PROMPT) for e in tier.catalogue.of(key)]
            assert len(entries) == 9
            assert all(entry.boost == 7.0 for entry in entries)


async def test_cold_runs_are_what_the_engine_says(opened: Opened) -> None:
    """The reference of these tests is the engine's own."""
    async with opened() as play:
        stream = play.flow.session("s").generate(PROMPT, max_new_tokens=4, policy="recompute")
        assert [token async for token in stream] == cold(PROMPT, 4)


async def test_all_is_forgotten_at_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """While what is still to be stored is copied, the next turns begin, and are not forgotten."""
    async with opened() as play:
        sessions = [play.flow.session(f"s{number}") for number in range(3)]
        for number, session in enumerate(sessions):
            await play.ask(session, prompt_of(100, number))
        held, release = Held(), play.flow.saver.release
        before = {name for session in sessions for name in session.requests}

        async def slow(names: Collection[str], patience: float = 0.0) -> None:
            if before.intersection(names):
                await held.wait()
            await release(names, patience)

        monkeypatch.setattr(play.flow.saver, "release", slow)
        forgetting = asyncio.create_task(play.flow.forget())
        await held.began.wait()
        decoding = Held()
        play.engine.before_step = decoding.wait
        turns = [asyncio.create_task(play.ask(s, [*s.tokens, 5])) for s in sessions]
        await decoding.began.wait()
        held.go.set()
        await forgetting
        decoding.go.set()
        await asyncio.gather(*turns)

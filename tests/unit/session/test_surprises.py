"""What nobody plans for: a flow that closes under loads that were lent, names that two tenants
share, two flows over one folder, clocks that jump, disks that are full."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ClosedError, ConfigError
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.testing.serving import ServingEngine
from cacheflow.tiers.archive import ArchiveWriter
from tests.unit.session.conftest import Held, cold, prompt_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.session.conftest import Opened

PROMPT = prompt_of(300)
NVME = "nvme"


async def test_a_flow_that_closes_while_chunks_are_lent(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loads' bytes lie in the tier itself when its flow is left: the turn is told, the tier
    closes behind whoever reads there, and nothing is left."""
    held = Held()
    publish = ServingEngine.publish

    async def held_up(self: ServingEngine, request_id: str, parts: Any) -> None:
        await held.wait()
        await publish(self, request_id, parts)

    dram = {"name": "dram", "backend": "dram"}
    async with opened(tiers=(dram,), staging_bytes=1 << 22) as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        await play.flow.flush()
        await session.forget()
        monkeypatch.setattr(ServingEngine, "publish", held_up)
        turn = asyncio.create_task(play.ask(session, PROMPT, policy="load"))
        await held.began.wait()
        asyncio.get_running_loop().call_later(0.05, held.go.set)
    with pytest.raises(ClosedError):
        await turn


async def test_one_name_under_two_tenants_at_once(opened: Opened) -> None:
    """Two sessions, alive at the same time, with the same prompts: neither finds, ends, cuts or
    forgets what is the other's."""
    async with opened() as play:
        one, other = (play.flow.session("s", tenant=name) for name in ("a", "b"))
        assert one is not other
        for turn in range(3):
            reports = await asyncio.gather(
                *(play.ask(each, [*PROMPT, *prompt_of(20 * turn, 7)]) for each in (one, other))
            )
            assert [report.usage.loaded_tokens for report in reports] == [0, 0]
        await play.flow.flush()
        assert play.flow.session("s", tenant="a") is one
        await one.close()
        assert other.resident_tokens == len(other.tokens) - 1
        await other.forget()
        assert (await play.ask(other, [*other.tokens, 5])).cached_tokens >= 288
        again = play.flow.session("s", tenant="a")
        assert again is not one
        assert again.tokens == ()


async def test_two_flows_over_one_folder(tmp_path: Path) -> None:
    """In one process, at once: each finds what the other has stored, and stays open when the other
    closes."""
    tier = {"name": "disk", "backend": NVME, "options": {"path": str(tmp_path / "kv")}}
    settings = Settings(tiers=(tier,), cache_dir=tmp_path, keep_costs=False, staging_bytes=1 << 22)
    async with AsyncExitStack() as stack:
        flows = []
        for _ in range(2):
            engine = ServingEngine()
            stack.push_async_callback(engine.aclose)
            flows.append(await stack.enter_async_context(CacheFlow.open(settings, engine=engine)))

        async def said(flow: CacheFlow, prompt: list[int]) -> None:
            stream = flow.session("s").generate(prompt, max_new_tokens=3)
            assert [token async for token in stream] == cold(prompt, 3)

        await asyncio.gather(*(said(flow, PROMPT) for flow in flows))
        await asyncio.gather(*(flow.flush() for flow in flows))
        await flows[1].session("s").close()
        await said(flows[0], [*PROMPT, *prompt_of(200, 1)])
        await flows[0].flush()
        await flows[0].forget()
        found = flows[1].session("t")
        stream = found.generate([*PROMPT, *prompt_of(200, 1)], max_new_tokens=1)
        assert [token async for token in stream]


async def test_a_full_disk_while_a_session_is_exported(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, nothing of it is left behind, and the session goes on; whether its tokens or its
    chunks were what did not fit."""
    async with opened() as play:
        session = play.flow.session("s")
        await play.ask(session, PROMPT)
        full = OSError(errno.ENOSPC, "No space left on device")

        def no_room(*_: object, **__: object) -> None:
            raise full

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.write_text", no_room)
            with pytest.raises(ConfigError, match="No space left"):
                await session.export(tmp_path / "out")
        assert not await asyncio.to_thread((tmp_path / "out").exists)

        add = ArchiveWriter.add
        count = 0

        async def sometimes(self: Any, backend: Any, info: Any) -> bool:
            nonlocal count
            count += 1
            if count == 5:
                raise full
            return await add(self, backend, info)

        with monkeypatch.context() as patch:
            patch.setattr("cacheflow.tiers.archive.ArchiveWriter.add", sometimes)
            with pytest.raises(ConfigError, match="No space left"):
                await session.export(tmp_path / "out")
        assert not await asyncio.to_thread((tmp_path / "out").exists)
        assert (await session.export(tmp_path / "out")).copied == 18
        await play.ask(session, [*session.tokens, 5])


async def test_the_wall_clock_may_jump(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Years, either way: no session ends before its time, nothing stored is lost."""
    async with opened() as play:
        session = play.flow.session("s", ttl=3600.0)
        await play.ask(session, PROMPT)
        await play.flow.flush()
        for jump in (10**9, -(10**9)):
            monkeypatch.setattr(time, "time", lambda jump=jump: time.monotonic() + jump)
            await session.hint("waiting", eta=5.0)
            await session.forget()
            report = await play.ask(session, [*session.tokens, 5])
            assert report.cached_tokens >= 288
        assert play.flow.session("s") is session


async def test_a_session_whose_time_is_over_in_a_turn(opened: Opened) -> None:
    """The turn is its use: it is closed when that has ended and its time has passed again."""
    async with opened() as play:
        session, held = play.flow.session("s", ttl=0.05), Held()
        play.engine.before_step = held.wait
        turn = asyncio.create_task(play.ask(session, PROMPT))
        await held.began.wait()
        await asyncio.sleep(0.2)  # four times as long as it may live without use
        assert not turn.done()
        held.go.set()
        await turn
        async with asyncio.timeout(60):
            while play.engine.open_requests:  # noqa: ASYNC110 - nobody says when
                await asyncio.sleep(0.01)
        with pytest.raises(ClosedError):
            await play.ask(session, PROMPT)

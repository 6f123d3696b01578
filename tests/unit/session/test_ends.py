"""Ends that nobody has planned: an event loop that stops, tasks that others cancel, bugs of ours.

Whatever waits for one of our tasks ends when that task does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ClosedError
from cacheflow.session.decoding import DecodeLoop
from cacheflow.testing.serving import ServingEngine
from cacheflow.types import Claim, ComputeBatch, TileWork
from tests.unit.session.conftest import Held, prompt_of
from tests.unit.session.test_decoding import ready
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.session.conftest import Opened

SECONDS = 60.0
"""Far more than any of this takes: what hangs fails."""

SCRIPT = """
import asyncio, sys
from pathlib import Path
from cacheflow import CacheFlow, Settings
from cacheflow.testing.serving import ServingEngine
from cacheflow.types import Claim, ComputeBatch, TileWork
from cacheflow.testing.storage import MemoryBackend

how, folder = sys.argv[1], Path(sys.argv[2])
prompt, kept = list(range(500)), []

def opened():
    settings = Settings(cache_dir=folder, staging_bytes=1 << 20, flush_seconds=1)
    return CacheFlow.open(settings, engine=ServingEngine(), backends={"store": MemoryBackend()})

async def turn(flow, began):
    async for _ in flow.session("agent").generate(prompt, max_new_tokens=400):
        began.set()

async def agent(began):
    async with opened() as flow:
        await turn(flow, began)

async def main():
    began = asyncio.Event()
    if how == "task":
        kept.append(asyncio.create_task(agent(began)))
        await began.wait()
        return
    kept.append(opened())
    flow = await kept[0].__aenter__()
    if how == "turn":
        kept.append(asyncio.create_task(turn(flow, began)))
        await began.wait()
    elif how == "iterator":
        kept.append(flow.session("agent").generate(prompt, max_new_tokens=400))
        await anext(kept[-1])
    elif how == "prefetch":
        kept.append(asyncio.create_task(flow.session("agent").prefetch(prompt)))
        await asyncio.sleep(0)
    elif how == "saved":
        async for _ in flow.session("agent").generate(prompt, max_new_tokens=2):
            pass
    if len(sys.argv) > 3:
        raise KeyboardInterrupt

try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
print("ended", flush=True)
"""


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("how", ["task", "turn", "iterator", "prefetch", "saved"])
def test_a_loop_that_ends_first(how: str, interrupted: bool, tmp_path: Path) -> None:
    """asyncio.run cancels all tasks there are, the flow's own too, and closes all generators. The
    process ends, without a complaint, whether the flow is held by one of those tasks or is just
    left open."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path), *(["ctrl-c"] if interrupted else [])],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "ended\n", done.stderr
    assert "Traceback" not in done.stderr


async def test_a_decode_loop_that_is_cancelled() -> None:
    """Who is in the step, and who waits for the next one, is told; so is who comes later."""
    engine, held = ServingEngine(), Held()
    loop = DecodeLoop(engine)
    for name in ("a", "b"):
        await ready(engine, name, 20)
    engine.before_step = held.wait
    before = asyncio.all_tasks()
    async with asyncio.timeout(SECONDS), loop.running():
        (decoding,) = asyncio.all_tasks() - before
        inside = asyncio.create_task(loop.next("a", 5))
        await held.began.wait()
        waits = asyncio.create_task(loop.next("b", 6))
        await asyncio.sleep(0)
        decoding.cancel()
        for task in (inside, waits):
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await loop.next("a", 7)
    await engine.aclose()


async def test_a_decode_loop_that_is_cancelled_before_it_begins() -> None:
    """A task that has not taken its first step never gets to its own clean-up."""
    engine = ServingEngine()
    loop = DecodeLoop(engine)
    await ready(engine, "a", 20)
    before = asyncio.all_tasks()
    async with asyncio.timeout(SECONDS), loop.running():
        (decoding,) = asyncio.all_tasks() - before
        decoding.cancel()
        with pytest.raises(ClosedError):
            await loop.next("a", 5)
    await engine.aclose()


async def test_a_decode_loop_with_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that answers with too few tokens breaks the loop: it says so, and nobody waits."""
    engine = ServingEngine()
    loop = DecodeLoop(engine)
    await ready(engine, "a", 20)

    async def none(request_ids: object, tokens: object) -> list[int]:
        return []

    engine.decode = none  # type: ignore[method-assign]
    async with asyncio.timeout(SECONDS), loop.running():
        with pytest.raises(ClosedError):
            await loop.next("a", 5)
    assert "the decode loop has failed" in caplog.text
    await engine.aclose()


async def test_forgetting_when_nothing_is_saved_any_more(opened: Opened) -> None:
    """What is to be stored waits for tasks that were cancelled: nobody waits for that."""
    before = asyncio.all_tasks()
    async with asyncio.timeout(SECONDS), opened() as play:
        ours = asyncio.all_tasks() - before
        session = play.flow.session("s")
        await play.ask(session, prompt_of(300))
        for task in ours:
            task.cancel()
        await asyncio.wait(ours)
        assert not await play.flow.flush()
        await session.forget()
        with pytest.raises(ClosedError):
            await play.ask(session, prompt_of(300))


async def test_closing_waits_for_compute_and_lets_none_begin() -> None:
    """The double's side of :meth:`Engine.close`: a request is closed in the moment of asking."""
    engine, began, go = ServingEngine(), threading.Event(), threading.Event()

    def hold(work: TileWork, layer: int) -> None:
        began.set()
        assert go.wait(SECONDS)

    engine.before_layer = hold
    await engine.open("a", prompt_of(64))
    first, second = (
        ComputeBatch((TileWork("a", tile, 0, is_suffix=True),)) for tile in engine.grid.split(0, 64)
    )
    async with asyncio.timeout(SECONDS):
        computing = asyncio.create_task(engine.recompute(first, lambda *_: Claim.WRITE))
        await until(began.is_set)
        closing = asyncio.create_task(engine.close("a"))
        await asyncio.sleep(0)
        refused = asyncio.create_task(engine.recompute(second, lambda *_: Claim.WRITE))
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        with pytest.raises(ClosedError):
            await refused
        (done,) = await computing
        assert not done.next_layer, "it goes on although somebody waits"
        await closing
    assert engine.open_requests == []
    await engine.aclose()

"""Tags are made and checked on threads: the event loop hashes nothing (promise 8)."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from cacheflow import CacheFlow, Generation, Settings
from cacheflow.kv.auth import ChunkAuth
from cacheflow.testing.serving import ServingEngine
from cacheflow.testing.storage import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

PROMPT = [(7 * at) % 1000 for at in range(300)]


async def test_tags_are_made_and_checked_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """When chunks are stored, looked up before storing, looked up for a restore, and loaded."""
    used: Counter[str] = Counter()
    on_loop: set[str] = set()

    def watch(name: str) -> None:
        method: Callable[..., Any] = getattr(ChunkAuth, name)

        def watched(*arguments: Any) -> Any:
            used[name] += 1
            if threading.current_thread() is threading.main_thread():
                on_loop.add(name)
            return method(*arguments)

        monkeypatch.setattr(ChunkAuth, name, watched)

    for name in ("header_tag", "block_tags", "check_header", "check_blocks"):
        watch(name)
    engine, store = ServingEngine(), MemoryBackend()
    settings = Settings(staging_bytes=1 << 24, keep_costs=False, policy="load", auth_key="x" * 32)
    async with CacheFlow.open(settings, engine=engine, backends={"t": store}) as flow:
        session = flow.session("s")
        for _ in range(2):
            report = Generation()
            made = session.generate(PROMPT, max_new_tokens=2, report=report)
            assert len([token async for token in made]) == 2
            assert await flow.flush(20)
            await session.forget()
        assert report.usage.loaded_tokens
        surveyed = used["check_header"]
        assert len([token async for token in session.generate(PROMPT, max_new_tokens=2)]) == 2
        assert await flow.flush(20)
        assert used["check_header"] > surveyed
    engine.shutdown()
    assert all(used.values())
    assert len(used) == 4
    assert on_loop == set()

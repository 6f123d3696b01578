"""What a session costs while it is used and after it is forgotten."""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import cacheflow.session.flow
from cacheflow.errors import ConfigError
from cacheflow.kv import extend_keys
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from cacheflow.types import ChunkKey

CHUNK = 16


@pytest.fixture
async def flow(model_folder: Path) -> AsyncIterator[CacheFlow]:
    grid = TileGrid((32, 32, 64), 128)
    engine: Any = await TransformersEngine.open_model(
        model_folder, dtype="float32", grid=grid, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    settings = Settings(staging_bytes=1 << 22)
    async with CacheFlow.open(settings, engine=engine, backends={"s": MemoryBackend()}) as opened:
        yield opened
    await engine.aclose()


def prompt_of(length: int) -> list[int]:
    return [(7 * i) % 311 for i in range(length)]


async def ask(flow: CacheFlow, name: str, prompt: list[int], tokens: int = 1) -> list[int]:
    stream = flow.session(name).generate(prompt, max_new_tokens=tokens)
    return [token async for token in stream]


@contextmanager
def turns_of_the_loop() -> Iterator[list[int]]:
    """Counts the turns of the event loop, in the one item of a list."""
    turn, going, loop = [0], True, asyncio.get_running_loop()

    def tick() -> None:
        turn[0] += 1
        if going:
            loop.call_soon(tick)

    tick()
    yield turn
    going = False


async def test_keys_never_block_the_loop(flow: CacheFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the length of a prompt, one turn of the loop makes the keys of a bounded number of
    tokens, and a chunk's key is made once in a session, not once a turn of it."""
    made: list[tuple[int, int]] = []
    with turns_of_the_loop() as turn:

        def watched(keys: list[ChunkKey], root: bytes, tokens: Any, size: int, limit: int) -> bool:
            before = len(keys)
            done = extend_keys(keys, root, tokens, size, limit=limit)
            made.append((turn[0], len(keys) - before))
            return done

        monkeypatch.setattr(cacheflow.session.flow, "TOKENS_IN_ONE_GO", 4 * CHUNK)
        monkeypatch.setattr(cacheflow.session.flow, "extend_keys", watched)
        history = prompt_of(300)
        history += await ask(flow, "s", history, tokens=40)
        history += prompt_of(200)
        await ask(flow, "s", history)
    assert len({turn for turn, _ in made}) == len(made)
    assert max(keys for _, keys in made) == 4
    assert sum(keys for _, keys in made) == len(history) // CHUNK


async def test_keys_that_went_on_are_the_keys(flow: CacheFlow) -> None:
    """Turn by turn, with other continuations in between: what is stored has the keys of the whole
    history made in one go, and is found by a new session."""
    first = prompt_of(150)
    history = first + await ask(flow, "s", first, tokens=20) + prompt_of(100)
    await ask(flow, "s", history)
    other = first + [5] * 100
    await ask(flow, "s", other)
    await flow.flush()
    (backend,) = flow.backends.values()
    for tokens in (history, other):
        assert all(await backend.lookup(flow.keys(tokens)))


async def test_an_impossible_token_costs_a_session_nothing(flow: CacheFlow) -> None:
    """The error names the token; what is in memory stays."""
    history = prompt_of(100)
    history += await ask(flow, "s", history)
    resident = flow.session("s").resident_tokens
    with pytest.raises(ConfigError, match=f"position {len(history)}"):
        await ask(flow, "s", [*history, -1])
    assert flow.session("s").resident_tokens == resident > 0


async def test_a_prompt_changed_while_it_waits_is_used_as_it_was(flow: CacheFlow) -> None:
    """The caller may go on with its list: the keys are of the tokens that are computed."""
    prompt = prompt_of(100)
    expected = await ask(flow, "cold", list(prompt), tokens=3)
    task = asyncio.create_task(ask(flow, "s", prompt, tokens=3))
    await asyncio.sleep(0)
    prompt[:] = [1] * 100
    assert await task == expected


async def test_prompts_as_arrays(flow: CacheFlow) -> None:
    """An array or tensor of tokens is the same prompt as a list of them, in every turn, and may be
    changed while it is used; a request opened with one directly has its tokens."""
    import numpy as np
    import torch

    prompt = prompt_of(100)
    history = prompt + await ask(flow, "list", prompt, tokens=100)
    held = flow.session("list").resident_tokens
    history = (history + prompt_of(300))[: 2 * held]  # what is new is as long as what is held
    expected = await ask(flow, "list", history, tokens=3)
    makers: dict[str, Any] = {"numpy": np.array, "torch": torch.tensor}
    for kind, make in makers.items():
        assert prompt + await ask(flow, kind, make(prompt), tokens=100) == history[: held + 1]
        changing = make(history)
        task = asyncio.create_task(ask(flow, kind, changing, tokens=3))
        await asyncio.sleep(0)
        changing[:] = 1
        assert await task == expected
    engine: Any = flow.engine
    await engine.open("direct", np.array(prompt))
    await engine.extend("direct", np.array([5]))
    assert engine._requests.get("direct").tokens == [*prompt, 5]
    await engine.close("direct")


def known(flow: CacheFlow) -> list[str]:
    gc.collect()
    return sorted(name for _, name in flow._sessions)


async def test_a_forgotten_session_is_dropped(flow: CacheFlow) -> None:
    """A session is known while its KV is in memory, and gone once it is forgotten, by itself or
    with all others; a turn that was abandoned leaves it usable, to be forgotten like any other."""
    for name in ("a", "b", "c"):
        await ask(flow, name, prompt_of(50))
    assert known(flow) == ["a", "b", "c"]
    assert flow.session("a").resident_tokens > 0
    await flow.session("a").forget()
    assert known(flow) == ["b", "c"]
    await flow.forget()
    assert known(flow) == []
    with pytest.raises(ConfigError):
        await ask(flow, "bad", [])
    stream: Any = flow.session("left").generate(prompt_of(50), max_new_tokens=5)
    await anext(stream)
    assert known(flow) == ["left"]
    await stream.aclose()
    del stream
    assert known(flow) == ["left"]
    assert flow.session("left").resident_tokens == 50
    await flow.forget()
    assert known(flow) == []


async def test_a_session_that_is_held_stays_the_one_of_its_name(flow: CacheFlow) -> None:
    """Whoever holds a forgotten session and asks for it by name has one session, not two; it works
    again, and forgetting everything reaches it."""
    session = flow.session("s")
    prompt = prompt_of(50)
    first = await ask(flow, "s", prompt)
    await session.forget()
    assert known(flow) == ["s"]
    assert flow.session("s") is session
    assert [token async for token in session.generate(prompt, max_new_tokens=1)] == first
    assert session.resident_tokens > 0
    await flow.forget()
    assert session.resident_tokens == 0
    assert flow._resident == set()


async def test_requests_of_one_name_never_meet_in_the_engine(flow: CacheFlow) -> None:
    """A new session of a name has other requests than a dropped one, which the engine may still be
    closing."""
    opened: list[str] = []
    open_: Any = flow.engine.open

    async def watched(request_id: str, tokens: Sequence[int]) -> None:
        opened.append(request_id)
        await open_(request_id, tokens)

    flow.engine.open = watched  # type: ignore[method-assign]
    for _ in range(3):
        await ask(flow, "s", prompt_of(20))
        await flow.forget()
    assert len(set(opened)) == 3

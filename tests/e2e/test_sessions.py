"""Sessions of a real model: who decodes beside whom, forks, messages, and what a cancel leaves."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from cacheflow.session import Session

GRID = TileGrid((32, 32, 64), 128)
LAYERS = 4


def text(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[tuple[CacheFlow, Any]]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=16, kv_bytes=1 << 28
    )
    chosen = Settings(staging_bytes=1 << 22, keep_costs=False, **settings)
    try:
        store = {"store": MemoryBackend()}
        async with CacheFlow.open(chosen, engine=engine, backends=store) as flow:
            yield flow, engine
        assert engine.kv_used_bytes == 0
    finally:
        await engine.aclose()


async def ask(
    session: Session, prompt: Sequence[int], new: int = 6, **options: Any
) -> tuple[list[int], Generation]:
    report = Generation()
    made = session.generate(prompt, max_new_tokens=new, report=report, **options)
    return [token async for token in made], report


async def cold_runs(
    flow: CacheFlow, prompt: Sequence[int], endings: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What is said after ``prompt`` and each ending where nothing is stored or kept."""
    cold = []
    for ending in endings:
        alone = flow.session("alone")
        cold.append((await ask(alone, [*prompt, *ending], policy="recompute", save=False))[0])
        await alone.forget()
    return cold


async def ask_all(
    branches: Sequence[Session], prompt: Sequence[int], endings: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[Generation], int]:
    """Each branch with its ending, at once: tokens, reports, and cells restored by all of them."""
    asked = [
        ask(branch, [*prompt, *ending], save=False)
        for branch, ending in zip(branches, endings, strict=True)
    ]
    tokens, reports = zip(*await asyncio.gather(*asked), strict=True)
    done = [report.restoration for report in reports if report.restoration is not None]
    cells = sum(d.recomputed_cells + sum(d.loaded_cells.values()) for d in done)
    return list(tokens), list(reports), cells


async def test_logits_are_the_same_whoever_decodes_beside(model_folder: Path) -> None:
    """In float32 the logits of a step are bit-equal alone and among seven others, whether they
    share pages or not."""
    async with opened(model_folder) as (_, engine):
        await engine.open("root", text(140))
        await engine.prefill("root")
        names = ["root", *(f"fork {i}" for i in range(3)), *(f"other {i}" for i in range(4))]
        for i, name in enumerate(names[1:]):
            if name.startswith("fork"):
                await engine.fork("root", name, 140 - i)
            else:
                await engine.open(name, text(50 + 31 * i, i))
                await engine.prefill(name)
        for i, name in enumerate(names):
            await engine.fork(name, f"alone {i}", len(engine._requests.get(name).tokens))
        together = await engine.decode_logits(names, list(range(8)))
        for i in range(8):
            alone = await engine.decode_logits([f"alone {i}"], [i])
            assert torch.equal(alone[0], together[i]), names[i]
        for name in engine.open_requests:
            await engine.close(name)


async def test_eight_branches_restore_their_prefix_once(model_folder: Path) -> None:
    """Forked while it was not in memory: the whole tiles are loaded or recomputed once. Forked in
    memory: nothing is, and one last page a branch is all that is added."""
    prompt, endings = text(384), [text(9, i) for i in range(8)]
    async with opened(model_folder) as (flow, engine):
        cold = await cold_runs(flow, prompt, endings)
        root = flow.session("root")
        await root.prefetch(prompt)
        await flow.flush()
        for resident in (False, True):
            await (root.prefetch() if resident else root.forget())
            if resident:
                await root.prefetch(prompt)
            used = engine.kv_used_bytes
            branches = [await root.fork() for _ in endings]
            assert engine.kv_used_bytes == used
            said, reports, cells = await ask_all(branches, prompt, endings)
            assert said == cold
            assert cells == (0 if resident else 384 * LAYERS)
            assert all(r.usage.resident_tokens == 384 for r in reports[1:] if resident)
            for branch in branches:
                await branch.close()


async def test_branches_copy_the_tile_in_which_they_part(model_folder: Path) -> None:
    """One of eight that were forgotten restores it, and all say what a cold run says."""
    prompt, endings = text(490), [text(9, i) for i in range(8)]
    async with opened(model_folder) as (flow, engine):
        cold = await cold_runs(flow, prompt, endings)
        root = flow.session("root")
        await root.prefetch(prompt)
        await flow.flush()
        await root.forget()
        branches = [await root.fork() for _ in endings]
        said, _, cells = await ask_all(branches, prompt, endings)
        assert said == cold
        assert cells == 490 // 16 * 16 * engine.layout.num_layers


async def test_a_forgotten_turn_loads_all_that_was_stored(model_folder: Path) -> None:
    """Turns end somewhere in a tile. What they left of it is loaded like everything else, only what
    is stored nowhere is computed, and the answers are those of cold runs."""
    async with opened(model_folder) as (flow, _):
        session = flow.session("s")
        history: list[int] = []
        for turn, new in enumerate((200, 60, 9, 150, 300)):
            prompt = [*history, *text(new, turn)]
            [cold] = await cold_runs(flow, prompt, [[]])
            said, report = await ask(session, prompt, policy="load")
            assert said == cold
            # The last token of an answer has no KV yet.
            stored, done = (len(history) or 1) - 1, report.restoration
            stored -= stored % 16
            assert done is not None
            assert (done.prefix_tokens, done.suffix_tokens) == (stored, len(prompt) - stored)
            assert sum(done.loaded_cells.values()) == stored * LAYERS
            history = [*prompt, *said]
            await flow.flush()
            await session.forget()


async def test_a_turn_that_joins_a_prefetch_says_the_same(model_folder: Path) -> None:
    """Its new message is computed under the last loads of what the prefetch restores."""
    async with opened(model_folder) as (flow, _):
        session, prompt = flow.session("s"), text(400)
        first, _ = await ask(session, prompt)
        history = [*prompt, *first, *text(20, 1)]
        expected, _ = await ask(session, history)
        await flow.flush()
        await session.truncate(len(prompt) + len(first))
        await session.forget()
        prefetch = asyncio.create_task(session.prefetch())
        await asyncio.sleep(0)
        joined, report = await ask(session, history)
        await prefetch
        assert joined == expected
        assert report.restoration is not None
        assert report.restoration.prefix_tokens == report.cached_tokens == 400
        assert report.restoration.suffix_tokens == len(history) - 400


async def test_a_prefetched_turn_computes_what_a_resident_one_does(model_folder: Path) -> None:
    """After a prefetch the turn restores nothing and computes the new message alone."""
    async with opened(model_folder) as (flow, _):
        session, prompt = flow.session("s"), text(400)
        first, _ = await ask(session, prompt)
        history = [*prompt, *first, *text(20, 1)]
        resident, report = await ask(session, history)
        await flow.flush()
        await session.truncate(len(prompt) + len(first))
        await session.forget()
        await session.prefetch()
        prefetched, again = await ask(session, history)
        assert prefetched == resident
        for each in (report, again):
            assert each.restoration is not None
            assert each.restoration.prefix_tokens == 0
        assert again.usage.resident_tokens == len(prompt) + len(first)
        assert report.usage.resident_tokens == again.usage.resident_tokens - 1


async def test_cancelled_at_any_moment_the_tokens_are_those_of_a_cold_run(
    model_folder: Path,
) -> None:
    """A turn is cancelled after any number of loop steps and asked again, from what it left."""
    async with opened(model_folder) as (flow, _):
        prompt = text(300)
        expected, _ = await ask(flow.session("cold"), prompt, policy="recompute")
        await flow.flush()
        await flow.forget()
        kept = set()
        session = flow.session("s")
        steps, done = 0, False
        while not done:  # how many steps a turn takes is the machine's affair
            task = asyncio.create_task(ask(session, prompt))
            for _ in range(steps):
                await asyncio.sleep(0)
            steps, done = steps * 5 // 4 + 3, task.done()
            task.cancel()
            await asyncio.wait([task])
            kept.add(session.resident_tokens)
            assert (await ask(session, prompt))[0] == expected
            await session.forget()
        assert len(kept) > 2


class Letters:
    """A chat template for the tiny model: one token a letter."""

    stop_tokens = frozenset({7})

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        text = "".join(f"{m['role']}:{m['content']};" for m in messages)
        answer = "assistant:" if add_generation_prompt else ""
        return [ord(letter) for letter in f"{tools or ''}{text}{answer}"]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("tools", [None, [{"name": "clock"}]])
async def test_messages_are_rendered(model_folder: Path, tools: Any) -> None:
    """A prompt of messages is the prompt of their tokens, and ends at the template's stop token."""
    async with opened(model_folder) as (flow, engine):
        engine.chat = Letters()
        messages = [{"role": "user", "content": "what time is it?"}]
        tokens = engine.chat.render(messages, tools)
        expected, _ = await ask(flow.session("tokens"), tokens, 30)
        engine.chat.stop_tokens = frozenset({expected[3]})
        session = flow.session("messages")
        made, report = await ask(session, messages, 30, tools=tools)  # type: ignore[arg-type]
        assert made == expected[: expected.index(expected[3]) + 1]
        assert report.finish_reason == "stop"
        assert session.tokens == (*tokens, *made)
        await session.forget()
        await session.prefetch(messages, tools=tools)
        assert session.resident_tokens == len(tokens) - len("assistant:")
        _, report = await ask(session, messages, 2, tools=tools)  # type: ignore[arg-type]
        assert report.usage.resident_tokens == len(tokens) - len("assistant:")

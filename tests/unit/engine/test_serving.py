"""Prefill, decode and forks of the transformers engine against transformers itself."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from cacheflow.abc import Decoder
from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.types import Claim, ComputeBatch, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.plugins.transformers import TransformersEngine

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

FAMILIES = ("llama", "llama-mha", "llama-yarn", "qwen2", "qwen3", "mistral", "phi3")


def prompt(total: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=total)


def stock(folder: Path, tokens: list[int], new: int) -> list[int]:
    """Greedy tokens of transformers' own generate with sdpa attention, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    made = model.generate(torch.tensor([tokens]), max_new_tokens=new, do_sample=False)
    return [int(token) for token in made[0, len(tokens) :]]


async def generate(engine: TransformersEngine, request_id: str, new: int) -> list[int]:
    made = [await engine.first_token(request_id)]
    while len(made) < new:
        made += await engine.decode([request_id], made[-1:])
    return made


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_transformers(
    engine_for: Engines, model_folder: Callable[[str], Path], family: str
) -> None:
    """In float32 the grid, the pages and the decode give the tokens of `model.generate`."""
    tokens = prompt(150)
    expected = stock(model_folder(family), tokens, 12)
    async with engine_for(family) as engine:
        await engine.open("a", tokens)
        await engine.prefill("a")
        assert await generate(engine, "a", 12) == expected


@pytest.mark.parametrize("total", [1, 15, 16, 32, 33, 64, 128, 192])
async def test_prompts_at_the_edges(
    engine_for: Engines, model_folder: Callable[[str], Path], total: int
) -> None:
    """One token, shorter than a chunk, exact multiples of chunks and tiles, and one more (field
    reports 35 and 129: something is always left to compute)."""
    tokens = prompt(total, seed=total)
    expected = stock(model_folder("llama"), tokens, 4)
    async with engine_for() as engine:
        await engine.open("a", tokens)
        await engine.prefill("a")
        assert await generate(engine, "a", 4) == expected


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_a_batch_decodes_as_its_rows_do_alone(
    engine_for: Engines, family: str, together: bool
) -> None:
    """Requests of different lengths decode together without padding, each as if it were alone;
    in one product for all rows, as in 16 bits, too."""
    prompts = {f"r{n}": prompt(n, seed=n) for n in (1, 31, 32, 70, 130, 200)}
    async with engine_for(family) as engine:
        engine.decodes_together = together
        alone, first = {}, {}
        for name, tokens in prompts.items():
            await engine.open(name, tokens)
            await engine.prefill(name)
            first[name] = await engine.first_token(name)
            alone[name] = await generate(engine, name, 8)
            await engine.close(name)
        for name, tokens in prompts.items():
            await engine.open(name, tokens)
            await engine.prefill(name)
        made = {name: [token] for name, token in first.items()}
        for _ in range(7):
            step = await engine.decode(list(made), [tokens[-1] for tokens in made.values()])
            for tokens, token in zip(made.values(), step, strict=True):
                tokens.append(token)
        assert made == alone


@pytest.mark.parametrize("together", [False, True])
async def test_forks_share_pages_and_go_their_own_ways(engine_for: Engines, together: bool) -> None:
    """Forks hold the whole pages of their source once, copy the last one, decode together as they
    would alone, and leave nothing behind whoever is closed first."""
    tokens = prompt(150)
    async with engine_for() as engine:
        engine.decodes_together = together
        await engine.open("root", tokens)
        await engine.prefill("root")
        used = engine.kv_used_bytes
        endings = {f"fork{i}": prompt(10, seed=100 + i) for i in range(4)}
        alone = {}
        for name, ending in endings.items():
            await engine.open(name, tokens[:140] + ending)
            await engine.prefill(name)
            alone[name] = await generate(engine, name, 6)
            await engine.close(name)
        for name, ending in endings.items():
            await engine.fork("root", name, 140)
            await engine.extend(name, ending)
            await engine.prefill(name, 140)
        tail = 64 * engine.layout.token_bytes
        assert engine.kv_used_bytes == used + len(endings) * tail
        await engine.close("root")
        made = {name: [await engine.first_token(name)] for name in endings}
        for _ in range(5):
            step = await engine.decode(list(made), [t[-1] for t in made.values()])
            for row, token in zip(made.values(), step, strict=True):
                row.append(token)
        assert made == alone
        for name in endings:
            await engine.close(name)
        assert engine.kv_used_bytes == 0


async def test_rows_that_share_a_page_need_not_be_neighbours(engine_for: Engines) -> None:
    """A stranger between two forks changes nothing for any of the three."""
    async with engine_for() as engine:
        engine.decodes_together = True
        await engine.open("root", prompt(100))
        await engine.prefill("root")
        await engine.open("stranger", prompt(100, seed=7))
        await engine.prefill("stranger")
        token = {name: await engine.first_token(name) for name in ("root", "stranger")}
        await engine.fork("root", "fork", 100)
        mixed: list[list[int]] = [[token["root"]], [token["stranger"]], [token["root"]]]
        for _ in range(6):
            step = await engine.decode(["root", "stranger", "fork"], [row[-1] for row in mixed])
            for row, made in zip(mixed, step, strict=True):
                row.append(made)
        assert mixed[0] == mixed[2]
        for name, row in (("root", mixed[0]), ("stranger", mixed[1])):
            await engine.close(name)
            await engine.open(name, prompt(100, seed=1 if name == "root" else 7))
            await engine.prefill(name)
            assert await generate(engine, name, 7) == row


async def test_a_fork_at_a_page_edge_copies_nothing(engine_for: Engines) -> None:
    """Up to a page's end a fork shares all it has; it grows pages of its own when it goes on."""
    async with engine_for() as engine:
        await engine.open("root", prompt(128))
        await engine.prefill("root")
        used = engine.kv_used_bytes
        await engine.fork("root", "fork", 64)
        assert engine.kv_used_bytes == used
        assert engine.segments("fork") == engine.segments("root")[:2]
        with pytest.raises(ValueError, match="128 tokens, not 129"):
            await engine.fork("root", "other", 129)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_cut_request_goes_on_as_one_that_was_never_longer(
    engine_for: Engines, shared: bool
) -> None:
    """Anywhere in a page, shared or not: its next tokens are those of a request of its own, what
    others share is as it was, and the pages behind the cut are free."""
    tokens, ending = prompt(150), prompt(20, seed=9)
    async with engine_for() as engine:
        for cut in (1, 31, 32, 100, 128, 149, 150):
            await engine.open("alone", tokens[:cut] + ending)
            await engine.prefill("alone")
            expected = await generate(engine, "alone", 4)
            await engine.close("alone")
            await engine.open("cut", tokens)
            await engine.prefill("cut")
            if shared:
                await engine.open("keeps", tokens)
                engine.share("cut", "keeps", 128)
            before = [tensor.clone() for layer in range(3) for tensor in engine.kv("cut", layer)]
            await engine.truncate("cut", cut)
            pages = engine.grid.index_at(cut - 1) + 1
            assert len(engine._requests.get("cut").pages) == pages
            assert all(segment.stop <= cut for segment in engine.segments("cut"))
            await engine.extend("cut", ending)
            await engine.prefill("cut", cut)
            assert await generate(engine, "cut", 4) == expected
            if shared:
                kept = [tensor for layer in range(3) for tensor in engine.kv("keeps", layer, 128)]
                for mine, old in zip(kept, before, strict=True):
                    assert torch.equal(mine, old[:, :128])
                await engine.close("keeps")
            await engine.close("cut")
            assert engine.kv_used_bytes == 0


async def test_what_cannot_be_cut(engine_for: Engines) -> None:
    """Fewer tokens than are kept, none at all, a closed request; and where the last page is shared
    and no memory is left for a copy, nothing has changed."""
    async with engine_for() as engine:
        token_bytes = engine.layout.token_bytes
        await engine.open("a", prompt(150))
        for wrong in (0, 151):
            with pytest.raises(ValueError, match="150 tokens"):
                await engine.truncate("a", wrong)
        await engine.close("a")
        with pytest.raises(ClosedError):
            await engine.truncate("a", 1)
    async with engine_for(kv_bytes=256 * token_bytes) as engine:
        await engine.open("a", prompt(128))
        await engine.prefill("a")
        await engine.open("b", prompt(128))
        engine.share("a", "b", 128)
        await engine.open("c", prompt(128, seed=3))
        with pytest.raises(CapacityError):
            await engine.truncate("a", 100)
        assert len(engine._requests.get("a").tokens) == 128
        await engine.close("c")
        await engine.truncate("a", 100)
        assert engine.open_requests == ["a", "b"]


async def test_bad_prompts(engine_for: Engines) -> None:
    """Empty, too long and impossible prompts are refused before anything is reserved."""
    async with engine_for() as engine:
        for tokens, message in (
            ([], "empty"),
            (prompt(513), "513 tokens are more than the model's context of 512"),
            ([5, 128], "token 128 at position 1"),
            ([-1], "token -1 at position 0"),
        ):
            with pytest.raises(ConfigError, match=message):
                await engine.open("a", tokens)
        assert engine.kv_used_bytes == 0
        await engine.open("a", prompt(512))
        with pytest.raises(ConfigError, match="513 tokens"):
            await engine.extend("a", [5])
        with pytest.raises(ValueError, match="already open"):
            await engine.open("a", [5])


async def test_capacity_is_a_cap(engine_for: Engines) -> None:
    """The cap on KV memory holds; a request that does not fit changes nothing, and what was freed
    serves the next one. A cap that no request fits is refused, with the least that works."""
    async with engine_for() as engine:
        token_bytes, least = engine.layout.token_bytes, engine.grid.tile(0).width
    with pytest.raises(ConfigError, match=f"kv_bytes .*at least {least * token_bytes}, "):
        async with engine_for(kv_bytes=least * token_bytes - 1):
            pass
    async with engine_for(kv_bytes=least * token_bytes):
        pass
    async with engine_for(kv_bytes=192 * token_bytes) as engine:
        await engine.open("a", prompt(128))
        with pytest.raises(CapacityError, match="raise kv_bytes"):
            await engine.open("b", prompt(100))
        assert engine.kv_used_bytes == 128 * token_bytes
        await engine.open("c", prompt(32))
        with pytest.raises(CapacityError):
            await engine.decode(["c", "a"], [5, 6])
        await engine.close("a")
        await engine.open("b", prompt(100))
        assert engine.kv_used_bytes == 160 * token_bytes


async def test_first_token_needs_the_last_token(engine_for: Engines) -> None:
    """A next token is never guessed from an older state."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        with pytest.raises(RuntimeError, match="was not computed"):
            await engine.first_token("a")
        await engine.prefill("a")
        await engine.first_token("a")
        await engine.extend("a", [7])
        with pytest.raises(RuntimeError, match="was not computed"):
            await engine.first_token("a")
        with pytest.raises(ValueError, match="two tokens"):
            await engine.decode(["a", "a"], [5, 6])


async def test_use_after_close(engine_for: Engines) -> None:
    """A closed request and a closed engine say so; closing again is nothing."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        await engine.close("a")
        await engine.close("a")
        with pytest.raises(ClosedError, match="'a' is not open"):
            await engine.first_token("a")
        await engine.open("b", prompt(40))
        await engine.aclose()
        await engine.aclose()
        calls: list[Any] = [engine.open("c", [5]), engine.prefill("b"), engine.decode(["b"], [5])]
        for call in calls:
            with pytest.raises(ClosedError):
                await call


async def test_the_first_token_does_not_wait_for_the_next_request(engine_for: Engines) -> None:
    """Once a suffix is computed its first token is there, whatever the compute thread is at."""
    held, free = threading.Event(), threading.Event()

    def claim(_work: TileWork, _layer: int) -> Claim:
        held.set()
        assert free.wait(30)
        return Claim.WRITE

    async with engine_for("llama") as engine:
        await engine.open("a", prompt(40))
        await engine.open("b", prompt(32, seed=2))
        await engine.prefill("a")
        work = TileWork("b", engine.grid.tile(0), 0)
        busy = asyncio.create_task(engine.recompute(ComputeBatch((work,)), claim))
        try:
            assert await asyncio.to_thread(held.wait, 30)
            async with asyncio.timeout(10):
                token = await engine.first_token("a")
            assert token in range(128)
        finally:
            free.set()
            await busy


async def test_the_engine_tells_while_it_decodes(engine_for: Engines) -> None:
    """From the call to its end: then whoever works behind the requests makes way."""
    async with engine_for("llama") as engine:
        assert isinstance(engine, Decoder)
        await engine.open("a", prompt(20))
        await engine.prefill("a")
        told = [engine.is_decoding]
        step = asyncio.ensure_future(engine.decode(["a"], [5]))
        await asyncio.sleep(0)
        told.append(engine.is_decoding)
        await step
        assert [*told, engine.is_decoding] == [False, True, False]

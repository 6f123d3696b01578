"""What may happen between two layers of a tile, and pages that two requests hold."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from cacheflow.errors import ClosedError
from cacheflow.types import Claim, ComputeBatch, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.transformers import TransformersEngine

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

LAYERS = 3


def prompt(total: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=total)


async def open_all(engine: TransformersEngine, **prompts: list[int]) -> None:
    for name, tokens in prompts.items():
        await engine.open(name, tokens)


def assert_same_kv(engine: TransformersEngine, one: str, other: str, tokens: int) -> None:
    for layer in range(LAYERS):
        for mine, theirs in zip(
            engine.kv(one, layer, tokens), engine.kv(other, layer, tokens), strict=True
        ):
            assert torch.equal(mine, theirs)


async def test_a_decode_step_goes_between_two_layers(engine_for: Engines) -> None:
    """A step that comes while a tile is at its first layer runs before the second one; the tile
    goes on from there, and both have the bits that they have alone."""
    waiting = threading.Event()

    def claim(_work: TileWork, layer: int) -> Claim:
        assert layer or waiting.wait(30)
        return Claim.WRITE

    async with engine_for("llama") as engine:
        tile = engine.grid.tile(0)
        await open_all(engine, a=prompt(40), alone=prompt(40), b=prompt(32, 2), cold=prompt(32, 2))
        for name in ("a", "alone", "cold"):
            await engine.prefill(name)
        first = await engine.first_token("a")
        expected = await engine.decode(["alone"], [first])
        work = TileWork("b", tile, 0)
        running = asyncio.create_task(engine.recompute(ComputeBatch((work,)), claim))
        await asyncio.sleep(0)
        step = asyncio.create_task(engine.decode(["a"], [first]))
        await asyncio.sleep(0)
        waiting.set()
        (done,) = await running
        assert done.next_layer == 1
        assert await step == expected
        rest = TileWork("b", tile, done.next_layer)
        (done,) = await engine.recompute(ComputeBatch((rest,)), claim)
        assert done.next_layer == LAYERS
        assert_same_kv(engine, "b", "cold", 32)
        assert_same_kv(engine, "a", "alone", 41)


async def test_tiles_get_on_however_many_steps_wait(engine_for: Engines) -> None:
    """Two sessions decode without a pause while a prompt is computed: it gets a layer in between
    each time, ends, and all have the bits that they have alone."""
    async with engine_for("llama") as engine:
        prompts = {"a": prompt(40), "b": prompt(70, 2), "c": prompt(300, 3)}
        await open_all(engine, **prompts)
        await open_all(engine, **{f"{name}-alone": tokens for name, tokens in prompts.items()})
        for name in ("a", "b"):
            await engine.prefill(name)
        busy = asyncio.create_task(engine.prefill("c"))

        async def talk(name: str) -> list[int]:
            made = [await engine.first_token(name)]
            while not busy.done():
                made += await engine.decode([name], made[-1:])
            return made

        spoken = await asyncio.gather(talk("a"), talk("b"))
        for name, made in zip(("a", "b"), spoken, strict=True):
            await engine.prefill(f"{name}-alone")
            alone = [await engine.first_token(f"{name}-alone")]
            while len(alone) < len(made):
                alone += await engine.decode([f"{name}-alone"], alone[-1:])
            assert made == alone
        await engine.prefill("c-alone")
        assert_same_kv(engine, "c", "c-alone", 300)
        segments = [(s.start, s.stop, s.width) for s in engine.segments("c")]
        assert segments == [(t.start, t.stop, t.width) for t in engine.grid.split(0, 300)]


async def test_shared_pages_are_held_once_and_as_long_as_anybody_does(engine_for: Engines) -> None:
    """The second request's pages are given back for the first one's, cells of either are those of
    both, and the last of the two to close frees them."""
    async with engine_for("llama") as engine:
        common = prompt(128)
        await open_all(engine, a=[*common, 5], b=[*common, 6, 7])
        both = engine.kv_used_bytes
        engine.share("a", "b", 128)
        assert engine.kv_used_bytes == both - 128 * engine.layout.token_bytes
        await engine.prefill("a", 0, 128)
        assert_same_kv(engine, "a", "b", 128)
        await engine.close("a")
        await engine.prefill("b", 128)
        await open_all(engine, cold=[*common, 6, 7])
        await engine.prefill("cold", 0, 128)
        await engine.prefill("cold", 128)
        assert await engine.first_token("b") == await engine.first_token("cold")
        await engine.close("b")
        await engine.close("cold")
        assert engine.kv_used_bytes == 0


async def test_a_paused_tile_goes_on_for_whoever_shares_it(engine_for: Engines) -> None:
    """One request stops a tile half way and is closed; the other takes it to the end, with the bits
    of an undisturbed pass."""
    async with engine_for("llama") as engine:
        common = prompt(64)
        await open_all(engine, a=common, b=[*common, 9], cold=common)
        engine.share("a", "b", 64)
        await engine.prefill("a", 0, 32)
        tile = engine.grid.tile(1)
        half = ComputeBatch((TileWork("a", tile, 0),))
        (done,) = await engine.recompute(
            half, lambda _work, layer: Claim.REFUSED if layer == 2 else Claim.WRITE
        )
        assert done.next_layer == 2
        await engine.close("a")
        rest = ComputeBatch((TileWork("b", tile, 2),))
        await engine.recompute(rest, lambda _work, _layer: Claim.WRITE)
        await engine.prefill("cold")
        assert_same_kv(engine, "b", "cold", 64)


async def test_only_whole_tiles_of_the_same_tokens_are_shared(engine_for: Engines) -> None:
    """Another beginning, a piece of a tile, or a request that is not open: refused, and nothing
    changes hands."""
    async with engine_for("llama") as engine:
        await open_all(engine, a=prompt(80), b=prompt(80, 2), c=prompt(80))
        used = engine.kv_used_bytes
        with pytest.raises(ValueError, match="differ in the first 32 tokens"):
            engine.share("a", "b", 32)
        with pytest.raises(ValueError, match="no whole tiles"):
            engine.share("a", "c", 48)
        with pytest.raises(ClosedError):
            engine.share("a", "gone", 32)
        assert engine.kv_used_bytes == used

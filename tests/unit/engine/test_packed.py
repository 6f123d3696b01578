"""Fast mode on the engine: tiles of several requests in one pass have the KV that each has alone,
within rounding; and exact mode never does it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from cacheflow.kv import is_packed
from cacheflow.types import Claim, ComputeBatch, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.transformers import TransformersEngine

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

LAYERS = 3
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}
"""Largest difference of a K or V over the largest one, stated in docs/scheduling.md."""


def prompt(total: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=total)


def works_of(engine: TransformersEngine, name: str, start: int, stop: int) -> list[TileWork]:
    tiles = engine.grid.split(start, stop)
    return [TileWork(name, tile, 0, is_suffix=True) for tile in tiles]


async def compute(
    engine: TransformersEngine, works: list[TileWork], chance: random.Random | None = None
) -> None:
    """One pass after the other, each broken off at random layers of random tiles."""

    def claim(work: TileWork, layer: int) -> Claim:
        late = chance is not None and layer > work.first_layer and chance.random() < 0.3
        behind = any(
            other.request_id == work.request_id
            and other.tile.stop <= work.tile.start
            and reached[other.tile.start, other.request_id] <= layer
            for other in works
        )
        if late or behind:
            return Claim.REFUSED
        reached[work.tile.start, work.request_id] = layer + 1
        return Claim.WRITE

    reached = {(work.tile.start, work.request_id): 0 for work in works}
    while left := {place: low for place, low in reached.items() if low < LAYERS}:
        low = min(left.values())
        batch = [
            TileWork(work.request_id, work.tile, low, is_suffix=True)
            for work in works
            if left.get((work.tile.start, work.request_id)) == low
        ]
        await engine.recompute(ComputeBatch(tuple(batch)), claim)


def assert_close(engine: TransformersEngine, one: str, other: str, limit: float) -> None:
    for layer in range(LAYERS):
        for ours, theirs in zip(engine.kv(one, layer), engine.kv(other, layer), strict=True):
            apart = (ours.float() - theirs.float()).abs().max()
            assert float(apart) <= limit * float(theirs.float().abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("seed", [0, 1])
async def test_a_pass_of_several_requests_is_right(
    engine_for: Engines, family: str, dtype: str, seed: int
) -> None:
    """Prompts of different lengths, one of them behind KV that is there already, broken off and
    gone on with anywhere: KV and logits as alone, in tolerance; tokens the same in float32."""
    chance = random.Random(seed)
    lengths = {"a": 70, "b": 33, "c": 16, "d": 90}
    async with engine_for(family, dtype=dtype, fast=True, grid=TileGrid((), 16)) as engine:
        for i, (name, length) in enumerate(lengths.items()):
            for copy in (name, f"{name}-alone"):
                await engine.open(copy, prompt(length, i))
            await engine.prefill(f"{name}-alone")
        await engine.prefill("d", 0, 48)
        starts = {"a": 0, "b": 0, "c": 0, "d": 48}
        works = [w for n in lengths for w in works_of(engine, n, starts[n], lengths[n])]
        await compute(engine, works, chance if seed else None)
        for name in lengths:
            assert_close(engine, name, f"{name}-alone", TOLERANCE[dtype])
            if dtype == "float32":
                assert await engine.first_token(name) == await engine.first_token(f"{name}-alone")


async def test_tiles_that_follow_each_other_are_one_wide_tile(engine_for: Engines) -> None:
    """Two tiles of one request see each other in the pass: the KV is the exact grid's, in
    tolerance, which it is not if the second does not see the first."""
    tokens = prompt(64, 5)
    async with engine_for("llama") as exact:
        await exact.open("r", tokens)
        await exact.prefill("r")
        expected = [exact.kv("r", layer) for layer in range(LAYERS)]
    async with engine_for("llama", fast=True, grid=TileGrid((), 16)) as engine:
        await engine.open("r", tokens)
        await compute(engine, works_of(engine, "r", 0, 64))
        for layer, pair in enumerate(expected):
            for ours, theirs in zip(engine.kv("r", layer), pair, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))


async def test_what_it_computes_is_marked(engine_for: Engines) -> None:
    """Every segment of fast mode is lossy, and its grid id says so; of exact mode none."""
    for fast in (False, True):
        async with engine_for("llama", fast=fast) as engine:
            await engine.open("r", prompt(40, 1))
            await engine.prefill("r")
            assert (engine.pack_tokens > 0) == is_packed(engine.grid_id) == fast
            assert all(segment.lossy == fast for segment in engine.segments("r"))


async def test_exact_mode_gives_every_tile_its_own_pass(engine_for: Engines) -> None:
    """Handed several at once all the same, it computes them one by one: the bits are those of each
    alone."""
    async with engine_for("llama") as engine:
        for i, name in enumerate("ab"):
            for copy in (name, f"{name}-alone"):
                await engine.open(copy, prompt(32, i))
            await engine.prefill(f"{name}-alone")
        works = [TileWork(name, engine.grid.tile(0), 0, is_suffix=True) for name in "ab"]
        await engine.recompute(ComputeBatch(tuple(works)), lambda _work, _layer: Claim.WRITE)
        for name in "ab":
            for layer in range(LAYERS):
                pairs = zip(engine.kv(name, layer), engine.kv(f"{name}-alone", layer), strict=True)
                assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


async def test_tiles_at_different_layers_share_no_pass(engine_for: Engines) -> None:
    """One layer's weights serve the whole pass."""
    async with engine_for("llama", fast=True, grid=TileGrid((), 16)) as engine:
        await engine.open("r", prompt(32, 1))
        one, other = works_of(engine, "r", 0, 32)
        later = TileWork("r", other.tile, 1, is_suffix=True)
        with pytest.raises(ValueError, match="same layer"):
            await engine.recompute(ComputeBatch((one, later)), lambda _w, _l: Claim.WRITE)

"""The first promise: what was recomputed, in whatever pieces, beside what was loaded, is bit for
bit what the run that never forgot has."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, Tile, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.transformers import TransformersEngine

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]

FAMILIES = ("llama", "llama-mha", "llama-yarn", "qwen2", "qwen3", "mistral", "phi3")
PREFIX, TOTAL = 208, 230
"""The last tile of the prefix, [192, 208), and the suffix share the grid tile [192, 256)."""


def prompt(total: int = TOTAL, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=total)


def staging(engine: TransformersEngine, layers: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * (layers * engine.layout.layer_stride()))


async def cold(engine: TransformersEngine, request_id: str, tokens: list[int]) -> None:
    """A run that never forgot: prefix on the grid, then the suffix."""
    await engine.open(request_id, tokens)
    await engine.prefill(request_id, 0, PREFIX)
    await engine.prefill(request_id, PREFIX)


async def poison(engine: TransformersEngine, request_id: str) -> None:
    """Every cell of the prefix is NaN until somebody makes it right."""
    every = Span(0, engine.layout.num_layers)
    chunks = range(PREFIX // engine.layout.chunk_tokens)
    view = staging(engine, len(every), 0xFF)
    await engine.publish(request_id, [StagedPart(c, every, view) for c in chunks])


async def move(
    engine: TransformersEngine, source: str, target: str, tile: Tile, layers: Span
) -> None:
    """Cells of ``tile`` out of one request and into another, as a store and a load would, from
    memory that a tier lends: it is read-only."""
    size = engine.layout.chunk_tokens
    chunks = range(tile.start // size, tile.stop // size)
    parts = [StagedPart(c, layers, staging(engine, len(layers), 0x55)) for c in chunks]
    await engine.capture(source, parts)
    await engine.publish(target, [replace(each, view=each.view.toreadonly()) for each in parts])


async def walk(
    engine: TransformersEngine,
    request_id: str,
    tile: Tile,
    loaded: set[int],
    rng: random.Random,
    *,
    stop: int | None = None,
    is_suffix: bool = False,
) -> None:
    """Compute a tile up to layer ``stop``, stopping and going on again at random."""
    layer, stop = 0, engine.layout.num_layers if stop is None else stop

    def claim(work: TileWork, at: int) -> Claim:
        if at >= stop or (at > work.first_layer and rng.random() < 0.5):
            return Claim.REFUSED
        return Claim.THROUGH if at in loaded else Claim.WRITE

    while layer < stop:
        work = TileWork(request_id, tile, layer, is_suffix)
        (done,) = await engine.recompute(ComputeBatch((work,)), claim)
        assert len(done.seconds) == done.next_layer - layer
        layer = done.next_layer
    if layer < engine.layout.num_layers:
        await engine.discard(request_id, tile.start)


async def restore(
    engine: TransformersEngine, source: str, target: str, rng: random.Random, share: float
) -> None:
    """Random holes: each cell (tile, layer) is loaded with probability ``share``."""
    layers = engine.layout.num_layers
    for tile in engine.grid.split(0, PREFIX):
        loaded = {layer for layer in range(layers) if rng.random() < share}
        for layer in loaded:
            await move(engine, source, target, tile, Span(layer, layer + 1))
        need = max((layer + 1 for layer in range(layers) if layer not in loaded), default=0)
        await walk(engine, target, tile, loaded, rng, stop=need)
    (suffix,) = engine.grid.split(PREFIX, TOTAL)
    await walk(engine, target, suffix, set(), rng, is_suffix=True)


def differing(engine: TransformersEngine, a: str, b: str) -> list[int]:
    """Layers in which the KV of two requests differs in any bit."""
    different = []
    for layer in range(engine.layout.num_layers):
        pairs = zip(engine.kv(a, layer), engine.kv(b, layer), strict=True)
        if not all(torch.equal(x, y) for x, y in pairs):
            different.append(layer)
    return different


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_any_mix_of_recompute_and_load_is_bit_exact(
    engine_for: Engines, family: str, dtype: str
) -> None:
    """Cells captured, lost and published back at random, the rest recomputed with stops after any
    layer: KV of every layer, and the next token, equal those of the run that never forgot."""
    tokens = prompt()
    async with engine_for(family, dtype=dtype) as engine:
        await cold(engine, "cold", tokens)
        expected = await engine.last_logits("cold")
        for seed, share in enumerate((0.0, 0.3, 0.7, 1.0)):
            await engine.open("warm", tokens)
            await poison(engine, "warm")
            await restore(engine, "cold", "warm", random.Random(seed), share)
            assert differing(engine, "cold", "warm") == []
            assert torch.equal(await engine.last_logits("warm"), expected)
            await engine.close("warm")


async def test_every_meeting_point_is_bit_exact(engine_for: Engines) -> None:
    """Recompute of tiles [0, i) and of layers [0, l) of tile i, loads of all the rest, for every
    tile i and layer l: 0 differing bytes."""
    tokens = prompt()
    async with engine_for() as engine:
        layers, tiles = engine.layout.num_layers, engine.grid.split(0, PREFIX)
        await cold(engine, "cold", tokens)
        for meeting in range(len(tiles)):
            for low in range(layers + 1):
                await engine.open("warm", tokens)
                await poison(engine, "warm")
                for i, tile in enumerate(tiles):
                    stop = layers if i < meeting else low if i == meeting else 0
                    if stop < layers:
                        await move(engine, "cold", "warm", tile, Span(stop, layers))
                    await walk(engine, "warm", tile, set(), random.Random(low), stop=stop)
                await engine.prefill("warm", PREFIX)
                assert differing(engine, "cold", "warm") == [], (meeting, low)
                await engine.close("warm")


async def test_several_turns_with_holes_and_provenance(engine_for: Engines) -> None:
    """Prefill, decode, a second turn; then the request is forgotten and its canonical prefix comes
    back with holes: the same KV, and the segments say how each token was computed."""
    tokens, rng = prompt(140), random.Random(5)
    async with engine_for() as engine:
        await engine.open("turns", tokens)
        await engine.prefill("turns")
        made = [await engine.first_token("turns")]
        for _ in range(5):
            made += await engine.decode(["turns"], made[-1:])
        await engine.extend("turns", prompt(90, seed=2))
        await engine.prefill("turns", 145)
        segments = [(s.start, s.stop, s.width) for s in engine.segments("turns")]
        assert segments == [
            (0, 32, 32),
            (32, 64, 32),
            (64, 128, 64),
            (128, 140, 12),
            (140, 145, 1),
            (145, 192, 47),
            (192, 235, 43),
        ]
        await engine.open("again", tokens)
        for tile in engine.grid.split(0, 128):
            loaded = {layer for layer in range(3) if rng.random() < 0.5}
            for layer in loaded:
                await move(engine, "turns", "again", tile, Span(layer, layer + 1))
            await walk(engine, "again", tile, loaded, rng)
        for layer in range(3):
            first = zip(engine.kv("turns", layer, 128), engine.kv("again", layer, 128), strict=True)
            assert all(torch.equal(a, b) for a, b in first)
        engine.set_segments("again", Span(0, 128), engine.segments("turns")[:3])
        await engine.prefill("again", 128)
        assert [s.start for s in engine.segments("again")] == [0, 32, 64, 128]


async def test_capture_zeroes_the_padding(engine_for: Engines) -> None:
    """Captured bytes are the payload order, and the padding behind a layer block is zero."""
    tokens = prompt()
    async with engine_for("llama-yarn", dtype="bfloat16") as engine:
        layout = engine.layout
        assert layout.layer_bytes() < layout.layer_stride()
        await cold(engine, "cold", tokens)
        part = StagedPart(3, Span(1, 3), staging(engine, 2, 0x55))
        await engine.capture("cold", [part])
        for i, layer in enumerate(part.layers):
            block = bytes(part.view[i * layout.layer_stride() : (i + 1) * layout.layer_stride()])
            kv = [x[:, 48:64].contiguous() for x in engine.kv("cold", layer)]
            payload = b"".join(bytes(x.view(torch.uint8).flatten().tolist()) for x in kv)
            assert block == payload.ljust(layout.layer_stride(), b"\0")


async def test_through_uses_loaded_keys_and_leaves_them(engine_for: Engines) -> None:
    """A layer passed THROUGH keeps the KV that is there and attends over it: other bytes there,
    other hidden states above."""
    async with engine_for() as engine:
        tile = engine.grid.split(0, 32)[0]
        for name, fill in (("zeros", 0x00), ("ones", 0x3F)):
            await engine.open(name, prompt())
            await engine.publish(
                name, [StagedPart(c, Span(1, 2), staging(engine, 1, fill)) for c in (0, 1)]
            )
            await walk(engine, name, tile, {1}, random.Random(0))
        byte = torch.tensor(0x3F3F3F3F, dtype=torch.int32).view(torch.float32)
        assert torch.equal(engine.kv("zeros", 1, 32)[0], torch.zeros(2, 32, 16))
        assert torch.equal(engine.kv("ones", 1, 32)[0], byte.expand(2, 32, 16))
        assert torch.equal(engine.kv("zeros", 0, 32)[0], engine.kv("ones", 0, 32)[0])
        assert not torch.equal(engine.kv("zeros", 2, 32)[0], engine.kv("ones", 2, 32)[0])


async def test_a_lost_hidden_state_is_an_error(engine_for: Engines) -> None:
    """Going on at a layer whose hidden state is not kept is refused, not computed wrongly."""
    async with engine_for() as engine:
        await engine.open("a", prompt())
        work: Any = TileWork("a", engine.grid.split(0, 32)[0], 1)
        with pytest.raises(RuntimeError, match="not at layer 1"):
            await engine.recompute(ComputeBatch((work,)), lambda _w, _l: Claim.WRITE)

"""What is marked canonical is, bit for bit, what a cold grid prefill makes, after any mix."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheflow.kv import decode_header, seal
from cacheflow.memory import buffer_from
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.testing.storage import MemoryBackend
from cacheflow.testing.vault import Vault
from cacheflow.types import Span, TileGrid, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cacheflow.types import ChunkInfo, Read

CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)


@asynccontextmanager
async def opened(
    folder: Path, stores: dict[str, MemoryBackend], grid: TileGrid = GRID
) -> AsyncIterator[CacheFlow]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=grid, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    settings = Settings(staging_bytes=1 << 22)
    try:
        async with CacheFlow.open(settings, engine=engine, backends=dict(stores)) as flow:
            yield flow
    finally:
        await engine.aclose()


async def turn(flow: CacheFlow, name: str, prompt: list[int], new: int, policy: str) -> list[int]:
    stream = flow.session(name).generate(prompt, max_new_tokens=new, policy=policy)
    tokens = [token async for token in stream]
    await flow.flush()
    return tokens


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


async def wrong_canonical(flow: CacheFlow, store: MemoryBackend, tokens: list[int]) -> list[int]:
    """Chunks of ``tokens`` stored as canonical whose bytes a cold grid prefill does not make."""
    engine: Any = flow.engine
    await engine.open("cold", tokens)
    await engine.prefill("cold")
    cold = await Vault.take(engine, "cold", tokens)
    await engine.close("cold")
    wrong = []
    for data in store.objects.values():
        info = decode_header(memoryview(data))
        chunk = cold.keys.index(info.key.chunk)
        ours = info.canonical and info.grid_id == engine.grid_id
        layers, stride = info.key.layers, engine.layout.layer_stride()
        expected = cold.payloads[chunk][layers.start * stride : layers.stop * stride]
        if ours and data[info.payload_offset :] != expected:
            wrong.append(chunk)
    return wrong


async def test_a_whole_tile_behind_decoded_tokens_never_becomes_canonical(
    model_folder: Path,
) -> None:
    """A tile computed in one pass, but over decoded tokens, keeps its history when those tokens
    are stored again from a cold prefill: its bits are not a cold prefill's."""
    store = MemoryBackend()
    async with opened(model_folder, {"s": store}) as flow:
        made = await turn(flow, "a", prompt_of(20), 45, "recompute")
        history = [*prompt_of(20), *made, *prompt_of(75, seed=1)]
        await turn(flow, "a", history, 1, "load")
        assert not any(decode_header(data).canonical for data in store.objects.values())
        await turn(flow, "b", history[:70], 1, "recompute")
        await flow.forget()
        await turn(flow, "c", [*history, *prompt_of(150, seed=2)], 1, "load")
        assert await wrong_canonical(flow, store, [*history, *prompt_of(150, seed=2)]) == []


def reseal(data: bytearray, **changes: Any) -> tuple[ChunkInfo, bytearray]:
    """The object as another engine would have stored it: a last bit of each value differs."""
    old = decode_header(data)
    payload = bytearray(data[old.payload_offset :])
    for at in range(0, len(payload), 4):
        payload[at] ^= 1
    info, header = seal(
        old.key,
        old.layout,
        memoryview(payload),
        grid_id=changes.get("grid_id", old.grid_id),
        segments=changes.get("segments", old.segments),
        canonical=changes.get("canonical", old.canonical),
    )
    return info, bytearray(header) + payload


async def test_chunks_of_another_grid_id_do_not_make_ours_canonical(model_folder: Path) -> None:
    """Chunks that another engine (threads, torch, device) stored as canonical are used, but what is
    computed behind them is not canonical here."""
    store = MemoryBackend()
    prompt = prompt_of(400)
    async with opened(model_folder, {"s": store}) as flow:
        await turn(flow, "a", prompt[:200], 1, "recompute")
        await flow.forget()
        for key, data in store.objects.items():
            store.objects[key] = reseal(data, grid_id="grid=32+32+64+128*;threads=64")[1]
        await turn(flow, "b", prompt, 1, "load")
        assert len(store.objects) == 25
        assert await wrong_canonical(flow, store, prompt) == []


async def test_provenance_is_that_of_the_copy_that_was_loaded(model_folder: Path) -> None:
    """Where one tier's canonical copy is corrupt and another tier's differs, the bits are the
    other's and so is the provenance."""
    first, second = MemoryBackend(), MemoryBackend()
    prompt = prompt_of(400)
    stores = {"first": first, "second": second}
    async with opened(model_folder, stores) as flow:
        await turn(flow, "a", prompt[:200], 1, "recompute")
        await flow.forget()
        for key, data in list(second.objects.items()):
            info = decode_header(data)
            if info.canonical:
                whole = tuple(replace(s, width=1) for s in info.segments)
                second.objects[key] = reseal(data, canonical=False, segments=whole)[1]
        for data in first.objects.values():
            data[-1] ^= 1

        async def later(read: Read) -> None:
            await asyncio.sleep(0.01)

        second.before_read = later
        await turn(flow, "b", prompt, 1, "load")
        assert await wrong_canonical(flow, second, prompt) == []


async def test_shards_of_one_chunk_are_judged_each(model_folder: Path) -> None:
    """A chunk whose lower layers come from a canonical copy and whose upper ones do not is none."""
    store = MemoryBackend()
    prompt = prompt_of(400)
    async with opened(model_folder, {"s": store}) as flow:
        engine: Any = flow.engine
        await engine.open("cold", prompt[:200])
        await engine.prefill("cold")
        vault = await Vault.take(engine, "cold", prompt[:200])
        await engine.close("cold")
        await put_halves(vault, store)
        vault.keys = flow.keys(prompt[:200])
        await turn(flow, "b", prompt, 1, "load")
        assert await wrong_canonical(flow, store, prompt) == []


async def put_halves(vault: Vault, store: MemoryBackend) -> None:
    for chunk in range(len(vault.keys)):
        for layers in (Span(0, 1), Span(1, 3)):
            await vault.put(store, chunk, layers)
    for key, data in list(store.objects.items()):
        if key.layers.start == 1:
            info, whole = reseal(data, canonical=False)
            header, payload = whole[: info.payload_offset], whole[info.payload_offset :]
            await store.store([Write(info, (buffer_from(header), buffer_from(payload)))])


async def test_engines_with_other_grids_share_a_store(model_folder: Path) -> None:
    """Two engines with different tiles over one store, taking turns in one conversation: what
    either finds canonical under its own grid id is its own cold prefill."""
    store = MemoryBackend()
    history = prompt_of(150)
    grids = (GRID, TileGrid((32, 64), 96))
    for number in range(4):
        async with opened(model_folder, {"s": store}, grids[number % 2]) as flow:
            history += await turn(flow, f"t{number}", history, 9, "load")
            history += prompt_of(40, seed=number)
            await flow.forget()
            assert await wrong_canonical(flow, store, history) == []

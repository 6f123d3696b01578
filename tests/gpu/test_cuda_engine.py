"""The engine on a CUDA device: the same bits, the order of streams, no hidden synchronisation."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if not torch.cuda.is_available():
    pytest.skip("CUDA: no device here", allow_module_level=True)

PREFIX, TOTAL = 208, 230


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


async def engine_of(folder: Path, dtype: str) -> TransformersEngine:
    return await TransformersEngine.open_model(
        folder, device="cuda", dtype=dtype, grid=TileGrid((32, 32, 64), 64), chunk_tokens=16
    )


def prompt() -> list[int]:
    return random.Random(1).choices(range(3, 128), k=TOTAL)


def staged(engine: TransformersEngine, chunk: int, layers: Span) -> StagedPart:
    size = len(layers) * engine.layout.layer_stride()
    host: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return StagedPart(chunk, layers, memoryview(host))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_recompute_beside_loads_is_bit_exact(folder: Path, dtype: str) -> None:
    """Layers [2, 4) of every tile loaded, the rest recomputed around them, stopped and resumed:
    0 differing bytes in any layer."""
    engine = await engine_of(folder, dtype)
    tokens = prompt()
    for name in ("cold", "warm"):
        await engine.open(name, tokens)
    await engine.prefill("cold", 0, PREFIX)
    for tile in engine.grid.split(0, PREFIX):
        chunks = range(tile.start // 16, tile.stop // 16)
        parts = [staged(engine, chunk, Span(2, 4)) for chunk in chunks]
        await engine.capture("cold", parts)
        await engine.publish("warm", parts)
        for first, stop in ((0, 3), (3, 6)):

            def claim(work: TileWork, layer: int, stop: int = stop) -> Claim:
                if layer >= stop:
                    return Claim.REFUSED
                return Claim.THROUGH if 2 <= layer < 4 else Claim.WRITE

            await engine.recompute(ComputeBatch((TileWork("warm", tile, first),)), claim)
    for layer in range(6):
        pairs = zip(engine.kv("cold", layer, PREFIX), engine.kv("warm", layer, PREFIX), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), layer
    await engine.aclose()


async def test_a_batch_decodes_as_its_rows_do_alone(folder: Path) -> None:
    """Greedy tokens of a batch with a shared page equal those of each request alone (fp32)."""
    engine = await engine_of(folder, "float32")
    engine.decodes_together = True
    await engine.open("root", prompt())
    await engine.prefill("root")
    alone, first = {}, {}
    for batch in (False, True):
        names = [f"{batch}{i}" for i in range(3)]
        for i, name in enumerate(names):
            await engine.fork("root", name, 200)
            await engine.extend(name, [5 + i] * (i + 1))
            await engine.prefill(name, 200)
            first[name] = await engine.first_token(name)
        made = {name: [first[name]] for name in names}
        for _ in range(6):
            groups = [names] if batch else [[name] for name in names]
            for group in groups:
                step = await engine.decode(group, [made[name][-1] for name in group])
                for name, token in zip(group, step, strict=True):
                    made[name].append(token)
        alone[batch] = list(made.values())
    assert alone[True] == alone[False]
    await engine.aclose()


@pytest.fixture
def no_hidden_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside a tile's layers torch raises where a call would wait for the device."""
    from cacheflow.plugins.transformers.walk import Walker

    tile = Walker.tile

    def watched(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return tile(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Walker, "tile", watched)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_hidden_sync")
async def test_a_tile_waits_for_nothing_but_its_marks(folder: Path) -> None:
    """Walking a tile issues no synchronising call; the layers' times come from the device."""
    engine = await engine_of(folder, "bfloat16")
    await engine.open("a", prompt())
    work = TileWork("a", engine.grid.split(0, 32)[0], 0)
    (done,) = await engine.recompute(ComputeBatch((work,)), lambda _w, _l: Claim.WRITE)
    assert len(done.seconds) == 6
    assert all(seconds > 0 for seconds in done.seconds)
    await engine.aclose()


async def test_capture_sees_what_compute_has_written(folder: Path) -> None:
    """A capture right behind a recompute holds the recomputed bytes, 50 times over."""
    engine = await engine_of(folder, "float16")
    await engine.open("a", prompt())
    part = staged(engine, 0, Span(0, 6))
    for _ in range(50):
        await engine.prefill("a", 0, 32)
        await engine.capture("a", [part])
        size = engine.layout.layer_bytes()
        for layer in range(6):
            at = layer * engine.layout.layer_stride()
            found = torch.frombuffer(part.view[at : at + size], dtype=torch.float16)
            kv = torch.stack(engine.kv("a", layer, 16)).cpu().flatten()
            assert torch.equal(found, kv)
    await engine.aclose()

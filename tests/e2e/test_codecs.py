"""Tiers that compress, and chunks that are authenticated, on a real engine and real files."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.errors import ConfigError
from cacheflow.kv import decode_header
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.vault import Vault
from cacheflow.types import Codec, LoadEnded, Span, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from cacheflow.restore import Restoration
    from cacheflow.types import ChunkInfo, Event

CHUNK = 256
"""Layer blocks of 64 KiB in float32, 32 KiB in bfloat16: large enough to shrink by pages."""
GRID = TileGrid((256, 512), 768)
TOKENS = 768 + 40


@asynccontextmanager
async def engine_of(folder: Path, dtype: str = "float32") -> AsyncIterator[Any]:
    engine = await TransformersEngine.open_model(
        folder, dtype=dtype, grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 28
    )
    try:
        yield engine
    finally:
        await engine.aclose()


@dataclass
class Turn:
    """What one prompt gave, in a CacheFlow of its own: closing it has stored everything."""

    tokens: list[int]
    restoration: Restoration
    payloads: Sequence[bytearray]
    """The KV of the prompt's whole chunks, as the engine has it."""
    loaded: int
    """Bytes that loads took off the tiers."""


async def turn(engine: Any, prompt: list[int], policy: str, **settings: Any) -> Turn:
    options: dict[str, Any] = {"staging_bytes": 1 << 24, "keep_costs": False, **settings}
    events: list[Event] = []
    async with CacheFlow.open(Settings(**options), engine=engine, observer=events.append) as flow:
        session, report = flow.session("s"), Generation()
        stream = session.generate(prompt, max_new_tokens=4, policy=policy, report=report)
        tokens = [token async for token in stream]
        vault = await Vault.take(engine, session.requests[0], prompt)
        assert report.restoration is not None
        loaded = sum(event.nbytes for event in events if isinstance(event, LoadEnded))
        return Turn(tokens, report.restoration, vault.payloads, loaded)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


def tier(folder: Path, codec: str = "raw", name: str = "disk") -> dict[str, Any]:
    options = {"path": str(folder), "create": True}
    return {"name": name, "backend": "nvme", "options": options, "codec": codec}


def stored_in(folder: Path) -> Iterator[tuple[Path, ChunkInfo]]:
    for path in sorted(folder.rglob("*.kv.*")):
        yield path, decode_header(path.read_bytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_lossless_is_bit_equal(model_folder: Path, tmp_path: Path, dtype: str) -> None:
    """zstd: the chunks on disk are smaller and canonical, and what is restored from them, by loads
    alone or by both ends, is torch.equal to the run that never forgot; loads count the bytes as
    stored."""
    prompt = prompt_of(TOKENS)
    async with engine_of(model_folder, dtype) as engine:
        cold = await turn(engine, prompt, "recompute", tiers=[tier(tmp_path, "zstd")])
        infos = [info for _, info in stored_in(tmp_path)]
        assert [info.codec for info in infos] == [Codec.ZSTD] * 3
        assert all(info.canonical and not info.lossy for info in infos)
        raw = engine.layout.payload_bytes()
        assert all(info.nbytes - info.payload_offset < 0.95 * raw for info in infos)
        for policy in ("load", "adaptive"):
            warm = await turn(engine, prompt, policy, tiers=[tier(tmp_path, "zstd")])
            if policy == "load":
                assert warm.restoration.recomputed_cells == 0
                assert warm.loaded == sum(info.nbytes - info.payload_offset for info in infos)
            assert warm.restoration.failed_loads == 0
            assert warm.tokens == cold.tokens
            for ours, theirs in zip(warm.payloads, cold.payloads, strict=True):
                pair = [torch.frombuffer(each, dtype=torch.int16) for each in (ours, theirs)]
                assert torch.equal(*pair)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
async def test_lossy_is_only_for_those_who_allow_it(
    model_folder: Path, tmp_path: Path, codec: str
) -> None:
    """A lossy tier is used where the setting allows it, close to the cold run but not equal, and
    its chunks say so. Everybody else does not see them: cold tokens, bit-equal KV."""
    prompt = prompt_of(TOKENS)
    lossy: dict[str, Any] = {"tiers": [tier(tmp_path, codec)], "allow_lossy": True}
    async with engine_of(model_folder) as engine:
        cold = await turn(engine, prompt, "recompute", **lossy)
        infos = [info for _, info in stored_in(tmp_path)]
        assert [info.codec for info in infos] == [Codec(codec)] * 3
        assert all(info.lossy and not info.canonical for info in infos)
        warm = await turn(engine, prompt, "load", **lossy)
        assert warm.restoration.recomputed_cells == 0
        pairs = list(zip(warm.payloads, cold.payloads, strict=True))
        for ours, theirs in pairs:
            a, b = (torch.frombuffer(each, dtype=torch.float32) for each in (ours, theirs))
            assert not torch.equal(a, b)
            assert float((a - b).abs().max()) < 0.07 * float(b.abs().max())
        exact = await turn(engine, prompt, "load", tiers=[tier(tmp_path)])
        assert exact.restoration.stored_tokens == 0
        assert exact.tokens == cold.tokens
        assert exact.payloads == cold.payloads


async def test_loss_is_inherited(model_folder: Path, tmp_path: Path) -> None:
    """What is computed behind lossy KV is stored as lossy, in a lossless tier as well; a later
    exact run takes none of it, computes its own and replaces it."""
    prompt = prompt_of(TOKENS)
    first, second = tmp_path / "lossy", tmp_path / "raw"
    async with engine_of(model_folder) as engine:
        lossy: dict[str, Any] = {"allow_lossy": True}
        await turn(engine, prompt[:300], "recompute", tiers=[tier(first, "int8")], **lossy)
        both = [tier(first, "int8"), tier(second, name="other")]
        await turn(engine, prompt, "load", tiers=both, **lossy)
        infos = [info for _, info in stored_in(second)]
        assert len(infos) == 3
        assert all(info.lossy and not info.canonical for info in infos)
        assert {info.codec for info in infos} == {Codec.RAW}
        exact = await turn(engine, prompt, "load", tiers=[tier(second)])
        assert exact.restoration.stored_tokens == 0
        assert all(info.canonical and not info.lossy for _, info in stored_in(second))
        again = await turn(engine, prompt, "load", tiers=[tier(second)])
        assert again.restoration.recomputed_cells == 0
        assert again.payloads == exact.payloads


async def test_a_lossy_tier_needs_the_setting(tmp_path: Path) -> None:
    """Lossy is off by default: asking for it in a tier only is a mistake that is named."""
    with pytest.raises(ConfigError, match=r"setting allow_lossy: tier 'disk' .* int8"):
        Settings(tiers=[tier(tmp_path, "int8")])


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_only_who_has_the_key_can_write(
    model_folder: Path, tmp_path: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a key set, chunks without tags, under another key, or changed by somebody who can make
    checksums are not used; they are computed anew and replaced. No secret is logged."""
    prompt = prompt_of(TOKENS)
    mine: dict[str, Any] = {"tiers": [tier(tmp_path, codec)], "auth_key": "m" * 20}
    others: dict[str, Any] = {"tiers": [tier(tmp_path, codec)], "auth_key": "o" * 20}
    async with engine_of(model_folder) as engine:
        cold = await turn(engine, prompt, "recompute", tiers=[tier(tmp_path, codec)])
        for who in (mine, others, mine):
            run = await turn(engine, prompt, "load", **who)
            assert run.restoration.stored_tokens == 0
            assert (run.tokens, run.payloads) == (cold.tokens, cold.payloads)
            again = await turn(engine, prompt, "load", **who)
            assert again.restoration.recomputed_cells == 0
        for path, info in stored_in(tmp_path):
            assert info.mac
            assert info.codec is Codec(codec)
            swap_layers(path, info)
        run = await turn(engine, prompt, "load", **mine)
        assert run.restoration.failed_loads > 0
        assert (run.tokens, run.payloads) == (cold.tokens, cold.payloads)
    assert "m" * 20 not in caplog.text
    assert "o" * 20 not in caplog.text


def swap_layers(path: Path, info: ChunkInfo) -> None:
    """Put layer 0's block in the place of layer 1's: its tag is a real one, of another layer."""
    data = bytearray(path.read_bytes())
    (a, size), (b, _) = (info.layer_range(Span(layer, layer + 1)) for layer in (0, 1))
    data[b : b + size] = data[a : a + size]
    path.write_bytes(data)


async def test_tenants_do_not_share_a_compressed_authenticated_tier(
    model_folder: Path, tmp_path: Path
) -> None:
    """Two salts over one folder: neither finds anything of the other's, and headers name both."""
    prompt = prompt_of(TOKENS)
    async with engine_of(model_folder) as engine:
        for salt in ("a", "b"):
            shared: dict[str, Any] = {"tiers": [tier(tmp_path, "zstd")], "auth_key": "k" * 16}
            run = await turn(engine, prompt, "load", salt=salt, **shared)
            assert run.restoration.stored_tokens == 0
        infos = [info for _, info in stored_in(tmp_path)]
        assert len(infos) == 6
        assert len({info.tenant_id for info in infos}) == 2
        assert len({info.model_id for info in infos}) == 1

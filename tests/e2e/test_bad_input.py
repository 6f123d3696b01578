"""Odd prompts, wrong models and spoilt stores: a clear error, or a correct recompute."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)


@asynccontextmanager
async def opened(
    model: Path, store: Path, *, dtype: str = "float32", salt: str = "", chunk: int = CHUNK
) -> AsyncIterator[CacheFlow]:
    engine = await TransformersEngine.open_model(
        model, dtype=dtype, grid=GRID, chunk_tokens=chunk, kv_bytes=1 << 28
    )
    try:
        settings = Settings(
            tiers=[{"name": "disk", "backend": "nvme", "options": {"path": str(store)}}],
            staging_bytes=1 << 22,
            salt=salt,
        )
        async with CacheFlow.open(settings, engine=engine) as flow:
            yield flow
    finally:
        await engine.aclose()


async def ask(
    flow: CacheFlow, prompt: list[int], policy: str = "load", new: int = 6
) -> tuple[list[int], Generation]:
    """Greedy tokens and report of one turn of a session that remembers nothing."""
    report = Generation()
    session = flow.session("s")
    await session.forget()
    stream = session.generate(prompt, max_new_tokens=new, policy=policy, report=report)
    tokens = [token async for token in stream]
    await flow.flush()
    return tokens, report


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(320) for _ in range(length)]


def stored_files(store: Path) -> list[Path]:
    """Object files, in a fixed order."""
    return [path for path in everything_in(store / "objects") if path.is_file()]


def everything_in(folder: Path) -> list[Path]:
    """All paths under a folder."""
    return sorted(folder.rglob("*"))


def make_newer(manifest: Path) -> None:
    """As a future version would have written it."""
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))


async def test_an_empty_prompt_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """Before anything is opened or stored."""
    async with opened(model_folder, tmp_path / "s") as flow:
        with pytest.raises(ConfigError, match="prompt is empty"):
            await ask(flow, [])
        assert await flow.backends["disk"].used_bytes() == 0


@pytest.mark.parametrize("bad", [-1, 320, 10**12])
async def test_a_token_outside_the_vocabulary_is_refused(
    model_folder: Path, tmp_path: Path, bad: int
) -> None:
    """The error names token and position; the session works afterwards."""
    async with opened(model_folder, tmp_path / "s") as flow:
        with pytest.raises(ConfigError, match=r"position 2"):
            await ask(flow, [1, 2, bad, 3])
        assert len((await ask(flow, [1, 2, 3]))[0]) == 6


async def test_a_prompt_longer_than_the_context_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    """Prompt and new tokens together must fit; both numbers are in the message."""
    async with opened(model_folder, tmp_path / "s") as flow:
        with pytest.raises(ConfigError, match="context of 2048"):
            await ask(flow, prompt_of(2050))
        with pytest.raises(ConfigError, match="context of 2048"):
            await ask(flow, prompt_of(2040), new=20)
        tokens, _ = await ask(flow, prompt_of(2043), new=6)
        assert len(tokens) == 6


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 128, 256, 257])
async def test_prompts_around_chunk_and_tile_edges(
    model_folder: Path, tmp_path: Path, length: int
) -> None:
    """Shorter than a chunk, an exact multiple, stored as a whole: same tokens every way.

    The last prompt token is always computed, so a fully stored prompt restores
    all chunks but the one that holds it.
    """
    async with opened(model_folder, tmp_path / "s") as flow:
        prompt = prompt_of(length)
        cold, first = await ask(flow, prompt, "recompute")
        assert first.cached_tokens == 0
        for policy in ("load", "adaptive", "recompute"):
            warm, report = await ask(flow, prompt, policy)
            assert warm == cold
            if policy == "load":
                assert report.cached_tokens == (length - 1) // CHUNK * CHUNK


async def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """The message has the path and what was missing."""
    with pytest.raises(ConfigError, match=r"nowhere.*no such folder.*hf download"):
        await TransformersEngine.open_model(tmp_path / "nowhere")


async def test_a_model_changed_under_its_store_is_a_miss(
    model_folder: Path, other_model_folder: Path, tmp_path: Path
) -> None:
    """Other weights of the same shape never see the old KV."""
    prompt = prompt_of(200)
    async with opened(model_folder, tmp_path / "s") as flow:
        old, _ = await ask(flow, prompt)
    async with opened(other_model_folder, tmp_path / "fresh") as flow:
        expected, _ = await ask(flow, prompt)
    async with opened(other_model_folder, tmp_path / "s") as flow:
        got, report = await ask(flow, prompt)
        assert report.cached_tokens == 0
        assert got == expected
        assert got != old
    async with opened(model_folder, tmp_path / "s") as flow:
        again, report = await ask(flow, prompt)
        assert report.cached_tokens == 192
        assert again == old


async def test_a_store_written_with_another_dtype_is_a_miss(
    model_folder: Path, tmp_path: Path
) -> None:
    """float16 and bfloat16 have the same size and are never mixed up."""
    prompt = prompt_of(200)
    async with opened(model_folder, tmp_path / "s", dtype="bfloat16") as flow:
        await ask(flow, prompt)
    async with opened(model_folder, tmp_path / "s", dtype="float16") as flow:
        _, report = await ask(flow, prompt)
        assert report.cached_tokens == 0


async def test_a_store_written_with_another_layout_is_a_miss(
    model_folder: Path, tmp_path: Path
) -> None:
    """Chunks of another length lie in the same folder: neither is served for the other, and both
    stay."""
    prompt = prompt_of(200)
    async with opened(model_folder, tmp_path / "s") as flow:
        cold, _ = await ask(flow, prompt)
    for chunk, cached in ((2 * CHUNK, (0, 192)), (CHUNK, (192, 192))):
        async with opened(model_folder, tmp_path / "s", chunk=chunk) as flow:
            for expected in cached:
                tokens, report = await ask(flow, prompt)
                assert (tokens, report.cached_tokens) == (cold, expected), chunk


async def test_tenants_do_not_share(model_folder: Path, tmp_path: Path) -> None:
    """Another salt is another key space in the same folder."""
    prompt = prompt_of(200)
    async with opened(model_folder, tmp_path / "s", salt="alice") as flow:
        await ask(flow, prompt)
    for salt, cached in (("bob", 0), ("", 0), ("alice", 192)):
        async with opened(model_folder, tmp_path / "s", salt=salt) as flow:
            _, report = await ask(flow, prompt)
            assert report.cached_tokens == cached, salt


async def test_a_store_of_another_version_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """And left exactly as it was."""
    store = tmp_path / "s"
    async with opened(model_folder, store) as flow:
        await ask(flow, prompt_of(100))
    make_newer(store / "cacheflow-store.json")
    before = everything_in(store)
    with pytest.raises(ConfigError, match="format 99"):
        async with opened(model_folder, store):
            pass
    assert everything_in(store) == before


async def test_a_folder_that_is_no_store_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """Someone's files are not touched."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not a CacheFlow store"):
        async with opened(model_folder, tmp_path):
            pass
    assert everything_in(tmp_path) == [tmp_path / "thesis.txt"]


async def test_chunks_with_damaged_headers_or_sizes_are_recomputed(
    model_folder: Path, tmp_path: Path
) -> None:
    """Truncated, grown, emptied and bit-flipped files: same tokens, nothing wrong served (65)."""
    prompt, chance = prompt_of(400), random.Random(3)
    async with opened(model_folder, tmp_path / "s") as flow:
        cold, _ = await ask(flow, prompt)
        for i, path in enumerate(stored_files(tmp_path / "s")[:4]):
            data = bytearray(path.read_bytes())
            match i:
                case 0:
                    path.write_bytes(data[: len(data) // 2])
                case 1:
                    data[chance.randrange(4096, len(data))] ^= 4
                    path.write_bytes(data)
                case 2:
                    data[chance.randrange(600)] ^= 4
                    path.write_bytes(data)
                case _:
                    path.write_bytes(data + b"more")
        warm, report = await ask(flow, prompt)
        assert warm == cold
        assert report.restoration is not None
        assert report.restoration.recomputed_share > 0


async def test_a_store_that_vanishes_is_recomputed(model_folder: Path, tmp_path: Path) -> None:
    """The folder is deleted under the running server: requests go on, saving is counted as lost."""
    import shutil

    prompt = prompt_of(200)
    async with opened(model_folder, tmp_path / "s") as flow:
        cold, _ = await ask(flow, prompt)
        shutil.rmtree(tmp_path / "s")
        warm, report = await ask(flow, prompt)
        assert warm == cold
        assert report.saved is not None
        assert report.saved["disk"].stored == 0
        assert report.saved["disk"].dropped > 0


async def test_an_abandoned_generation_leaves_a_usable_session(
    model_folder: Path, tmp_path: Path
) -> None:
    """Closing the iterator half way keeps the KV that is complete, and the next turn uses it."""
    async with opened(model_folder, tmp_path / "s") as flow:
        prompt = prompt_of(100)
        cold, _ = await ask(flow, prompt)
        session = flow.session("s")
        await session.forget()
        stream: Any = session.generate(prompt, max_new_tokens=50)
        async for _ in stream:
            break
        await stream.aclose()
        assert session.resident_tokens == len(prompt)
        assert (await ask(flow, prompt))[0] == cold


async def test_prefix_drift_uses_what_is_still_the_same(model_folder: Path, tmp_path: Path) -> None:
    """A prompt that differs from some token on uses the chunks before it."""
    async with opened(model_folder, tmp_path / "s") as flow:
        prompt = prompt_of(300)
        await ask(flow, prompt)
        _, report = await ask(flow, [*prompt[:150], *prompt_of(150, seed=9)])
        assert report.cached_tokens == 144


async def test_staging_too_small_for_the_model_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    """Before any request: the message names the setting and how much is needed."""
    engine = await TransformersEngine.open_model(model_folder, dtype="float32", kv_bytes=1 << 28)
    tiers = [
        {"name": name, "backend": "nvme", "options": {"path": str(tmp_path / name)}}
        for name in ("one", "two")
    ]
    with pytest.raises(ConfigError, match=r"staging_bytes.*at least \d+"):
        async with CacheFlow.open(Settings(tiers=tiers, staging_bytes=1 << 20), engine=engine):
            pass
    await engine.aclose()

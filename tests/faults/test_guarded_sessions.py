"""Sessions of a real engine over the tiers of the settings, when storage goes bad underneath."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.session import CacheFlow, Generation
from cacheflow.settings import Settings
from cacheflow.testing.faults import Fault, FaultKind, FaultyBackend
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.types import LoadEnded, LoadOutcome, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from cacheflow.types import Event

GRID = TileGrid((32, 32, 64), 128)
PROMPT = [random.Random(4).randrange(320) for _ in range(405)]


@asynccontextmanager
async def opened(
    folder: Path, settings: Settings, observer: Any = None, **options: Any
) -> AsyncIterator[CacheFlow]:
    engine = await TransformersEngine.open_model(
        folder, dtype="float32", grid=GRID, chunk_tokens=16, kv_bytes=1 << 28
    )
    try:
        async with CacheFlow.open(settings, engine=engine, observer=observer, **options) as flow:
            yield flow
    finally:
        await engine.aclose()


async def ask(flow: CacheFlow, *, policy: str, save: bool) -> tuple[list[int], Generation]:
    """Tokens after the prompt; what is to be stored is stored on return."""
    session, report = flow.session("s"), Generation()
    stream = session.generate(PROMPT, max_new_tokens=3, policy=policy, save=save, report=report)
    tokens = [token async for token in stream]
    await session.forget()
    await flow.flush()
    return tokens, report


async def test_a_flipped_bit_on_disk_is_found_once_and_repaired_by_the_next_save(
    model_folder: Path, tmp_path: Path
) -> None:
    """One load fails its checksum and its tile is recomputed; the request after it is not promised
    the object again, and when it has saved, all is loaded."""
    tier = {"name": "disk", "backend": "nvme", "options": {"path": str(tmp_path)}}
    outcomes: list[LoadOutcome] = []

    def watch(event: Event) -> None:
        if isinstance(event, LoadEnded):
            outcomes.append(event.outcome)

    def flip() -> None:
        file = next(path for path in (tmp_path / "objects").rglob("*") if path.is_file())
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    settings = Settings(tiers=[tier], staging_bytes=1 << 22)
    async with opened(model_folder, settings, watch) as flow:
        cold, _ = await ask(flow, policy="recompute", save=True)
        await asyncio.to_thread(flip)
        for _ in range(20):  # until a lookup answers before the little model is done
            if not outcomes:
                assert (await ask(flow, policy="load", save=False))[0] == cold
        assert outcomes.count(LoadOutcome.CORRUPT) == 1
        outcomes.clear()
        assert (await ask(flow, policy="load", save=True))[0] == cold
        assert LoadOutcome.CORRUPT not in outcomes
        loaded: dict[str, int] = {}
        for _ in range(20):
            if loaded != {"disk": 25 * 16 * 3}:
                tokens, report = await ask(flow, policy="load", save=False)
                assert tokens == cold
                assert report.restoration is not None
                loaded = report.restoration.loaded_cells
        assert loaded == {"disk": 25 * 16 * 3}


async def test_a_sick_tier_costs_a_save_next_to_nothing(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One chunk is copied out of the engine to find out; the rest of the save is dropped, without a
    line in the log: it says once that the tier is set aside."""
    faulty = FaultyBackend(MemoryBackend())
    guarded = Guarded(faulty, "sick", limits=HealthLimits(first_wait=60.0))
    settings = Settings(staging_bytes=1 << 22)
    async with opened(model_folder, settings, backends={"sick": guarded}) as flow:
        faulty.inject(Fault(FaultKind.DISCONNECT, "lookup"))
        while guarded.reading.well:
            await ask(flow, policy="adaptive", save=False)
        capture: Any = flow.engine.capture
        captured = 0

        async def watched(request_id: str, parts: Any) -> None:
            nonlocal captured
            captured += 1
            await capture(request_id, parts)

        flow.engine.capture = watched  # type: ignore[method-assign]
        _, report = await ask(flow, policy="adaptive", save=True)
        assert report.saved is not None
        assert report.saved["sick"].dropped == 25
        assert captured <= 2
        told = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len([line for line in told if "set aside" in line]) == 1
        assert not [line for line in told if "not stored" in line]
        faulty.heal()
    await guarded.aclose()

"""A pipeline of real processes: one stage each, beside the cold run of a single process."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.types import LoadEnded, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.session import CacheFlow
    from cacheflow.testing.processes import Seat
    from cacheflow.testing.storage import MemoryBackend
    from cacheflow.types import Event

LAYERS = 4
CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)
PREFIX = 384
"""Five whole tiles."""
HIDDEN_BYTES = 8192
"""Of one chunk: 16 tokens x 96 x 4 bytes, in whole pages."""
NEW = 6
PROMPT = [random.Random(3).randrange(320) for _ in range(PREFIX + 9)]


@dataclass
class Rank:
    """One stage of a running pipeline, and what is compared."""

    seat: Seat
    engine: Any
    flow: CacheFlow
    store: MemoryBackend
    reference: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    async def turn(
        self, policy: str = "adaptive", *, save: bool = False, prompt: list[int] = PROMPT
    ) -> dict[str, Any]:
        """Generate after the prompt with nothing in memory; what came of it, and compare the KV."""
        from cacheflow.session import Generation

        self.events.clear()
        report = Generation()
        session = self.flow.session("talk")
        options: dict[str, Any] = {"max_new_tokens": NEW, "policy": policy}
        turns = session.generate(prompt, save=save, report=report, **options)
        tokens = [token async for token in turns]
        same = self.is_same_as_reference(self.engine.open_requests[0])
        await self.flow.flush(30.0)
        await self.flow.forget()
        restoration = report.restoration
        assert restoration is not None
        return {
            "tokens": tokens,
            "same": same,
            "prefix": restoration.prefix_tokens,
            "recomputed": restoration.recomputed_share,
            "activations": restoration.hidden_chunks,
            "hidden bytes": sum(
                e.nbytes for e in self.events if isinstance(e, LoadEnded) and e.hidden
            ),
            "failed": restoration.failed_loads,
            "balance": self.flow.restorer.stage.balance if self.flow.restorer.stage else None,
        }

    def is_same_as_reference(self, request: str) -> bool:
        """Every bit of the prefix's KV in this stage's layers."""
        import torch

        found = True
        for local, layer in enumerate(self.engine.shard.layers):
            keys, values = self.engine.kv(request, local, PREFIX)
            found &= torch.equal(keys, self.reference[f"k{layer}"])
            found &= torch.equal(values, self.reference[f"v{layer}"])
        return found

    def stored(self, kind: str) -> list[Any]:
        """Keys of the objects of a kind."""
        return [key for key in self.store.objects if key.kind.value == kind]


@asynccontextmanager
async def running(seat: Seat, folder: str, deadline: float = 30.0) -> AsyncIterator[Rank]:
    """This process's stage, open; its store is in memory and empty."""
    from safetensors.torch import load_file

    from cacheflow.plugins.pipeline import PipelineEngine
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings
    from cacheflow.testing.storage import MemoryBackend

    engine = await PipelineEngine.open_model(
        Path(folder) / "model",
        dtype="float32",
        grid=GRID,
        chunk_tokens=CHUNK,
        kv_bytes=1 << 26,
        rank=seat.rank,
        ranks=seat.count,
        init_method=seat.init_method,
        deadline=deadline,
    )
    store, events = MemoryBackend(), []  # type: ignore[var-annotated]
    settings = Settings(staging_bytes=1 << 24, keep_costs=False)
    try:
        async with CacheFlow.open(
            settings, engine=engine, backends={"store": store}, observer=events.append
        ) as flow:
            reference = load_file(Path(folder) / "reference.safetensors")
            yield Rank(seat, engine, flow, store, reference, events)
    finally:
        await engine.aclose()


def prepare(folder: Path) -> Path:
    """Write a model into ``folder``, and KV and tokens of its cold run in a single process."""
    from safetensors.torch import save_file

    from cacheflow.testing.tiny_model import save_tiny_llama

    save_tiny_llama(folder / "model", num_key_value_heads=6)
    kv, tokens = asyncio.run(_cold_run(folder / "model"))
    save_file(kv, folder / "reference.safetensors")
    (folder / "tokens").write_text(" ".join(map(str, tokens)))
    return folder


async def _cold_run(model: Path) -> tuple[dict[str, Any], list[int]]:
    from cacheflow.plugins.transformers import TransformersEngine
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings

    engine = await TransformersEngine.open_model(
        model, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 26
    )
    kv: dict[str, Any] = {}
    try:
        async with CacheFlow.open(Settings(keep_costs=False), engine=engine, backends={}) as flow:
            turns = flow.session("cold").generate(PROMPT, max_new_tokens=NEW)
            tokens = [token async for token in turns]
            for layer in range(LAYERS):
                keys, values = engine.kv(engine.open_requests[0], layer, PREFIX)
                kv |= {f"k{layer}": keys.contiguous(), f"v{layer}": values.contiguous()}
    finally:
        await engine.aclose()
    return kv, tokens

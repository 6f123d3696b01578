"""The engine that whole campaigns on a pool share a form of: real, small, with a random model."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["small_engine"]


@asynccontextmanager
async def small_engine(model_folder: Path) -> AsyncIterator[TransformersEngine]:
    """Closed when the context is left."""
    engine = await TransformersEngine.open_model(
        model_folder,
        dtype="float32",
        grid=TileGrid((32, 32, 64), 128),
        chunk_tokens=16,
        kv_bytes=1 << 28,
    )
    try:
        yield engine
    finally:
        await engine.aclose()

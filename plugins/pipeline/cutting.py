"""Loading one stage's layers: the whole model is read and checked, what others hold is let go.

Knows models, no ranks' connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from cacheflow.plugins.transformers.check import check_walk
from cacheflow.plugins.transformers.device import fast_dtype
from cacheflow.plugins.transformers.engine import TransformersEngine
from cacheflow.plugins.transformers.opening import load_parts, streams_of

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import KVLayout, Shard, TileGrid

__all__ = ["keep_layers", "load_checked"]


async def load_checked(
    model: str | Path,
    dtype: str,
    device: torch.device,
    chunk_tokens: int,
    grid: TileGrid,
    threads: int,
) -> tuple[Any, dict[str, Any]]:
    """The whole model on the CPU, in the dtype that suits ``device``, and what follows from it.

    Raises:
        ConfigError: walking its layers does not give what the model gives, or as for one process.
    """
    host = torch.device("cpu")
    chosen = fast_dtype(device) if dtype == "auto" else dtype
    loaded, parts = await asyncio.to_thread(load_parts, model, chosen, host, chunk_tokens)
    layout: KVLayout = parts["layout"]
    whole = TransformersEngine(
        loaded,
        grid=grid,
        kv_bytes=grid.tile(0).width * layout.token_bytes,
        threads=threads,
        streams=streams_of(host),
        **parts,
    )
    try:
        await check_walk(whole, loaded)
    finally:
        await whole.aclose()
    return loaded, parts


def keep_layers(model: Any, shard: Shard, device: torch.device) -> None:
    """Let go of what ``shard`` does not have, and move the rest to ``device``. Blocking."""
    body, layers = model.model, shard.layers
    body.layers = torch.nn.ModuleList(list(body.layers)[layers.start : layers.stop])
    if layers.start:
        body.embed_tokens = None
    if layers.stop < shard.whole.num_layers:
        body.norm = model.lm_head = None
    model.to(device)

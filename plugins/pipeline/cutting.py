"""Loading one stage's layers: the whole model is read and checked, what others hold is let go.

Knows models, no ranks' connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from cacheflow.plugins.transformers.check import check_walk
from cacheflow.plugins.transformers.engine import TransformersEngine
from cacheflow.plugins.transformers.opening import streams_of

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.plugins.transformers.opening import Options
    from cacheflow.types import Shard

__all__ = ["keep_layers", "load_checked"]


async def load_checked(
    model: str | Path, options: Options, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    """The whole model on the CPU, in the dtype that suits ``device``, and what follows from it.

    Raises:
        ConfigError: walking its layers does not give what the model gives, or as for one process.
    """
    host = torch.device("cpu")
    loaded, parts = await asyncio.to_thread(options.load, model, device, onto=host)
    a_tile = options.grid.tile(0).width * parts["layout"].token_bytes
    whole = TransformersEngine(loaded, streams=streams_of(host), **{**parts, "kv_bytes": a_tile})
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

"""What opening an engine takes beside the engine: its options checked, its model read, its streams.

Knows no requests. Engines over several ranks open with the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.lanes import CpuStreams, CudaStreams, Streams
from cacheflow.plugins.transformers.model import identity_of, kv_layout, load_model, load_tokenizer

if TYPE_CHECKING:
    import torch

    from cacheflow.types import TileGrid

__all__ = ["check_options", "load_parts", "streams_of"]


def load_parts(
    model: str | Path, dtype: str, where: torch.device, chunk_tokens: int
) -> tuple[Any, dict[str, Any]]:
    """The model in a folder, and what of the engine's arguments follows from it. Blocking."""
    folder = Path(model).expanduser()
    loaded = load_model(folder, dtype, where)
    layout = kv_layout(loaded.config, loaded.dtype, chunk_tokens)
    return loaded, {
        "identity": identity_of(loaded, folder, layout),
        "layout": layout,
        "tokenizer": load_tokenizer(folder),
    }


def streams_of(device: torch.device) -> Streams:
    """The streams that go with a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


def check_options(grid: TileGrid, chunk_tokens: int, threads: int, kv_bytes: int) -> None:
    """Raise ConfigError naming the first option that cannot be."""
    for name, value in (
        ("threads", threads),
        ("kv_bytes", kv_bytes),
        ("chunk_tokens", chunk_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    try:
        grid.check(chunk_tokens)
    except ValueError as error:
        raise ConfigError(f"chunk_tokens={chunk_tokens}: {error}") from error

"""What opening an engine takes beside the engine: its options checked, its model read, its streams.

Knows no requests. Engines over several ranks open with the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.device import fast_dtype
from cacheflow.plugins.transformers.lanes import CpuStreams, CudaStreams, Streams
from cacheflow.plugins.transformers.model import identity_of, kv_layout, load_model, load_tokenizer

if TYPE_CHECKING:
    import torch

    from cacheflow.types import TileGrid

__all__ = ["Options", "streams_of"]

_MOST_THREADS: Final = 1024
"""OpenMP ends the process where it cannot start a thread."""


@dataclass(frozen=True, slots=True)
class Options:
    """What :meth:`TransformersEngine.open_model` and those of engines over ranks have in common.

    Raises:
        ConfigError: one of them cannot be; names it.
    """

    dtype: str
    threads: int
    kv_bytes: int
    chunk_tokens: int
    grid: TileGrid

    def __post_init__(self) -> None:
        for name in ("threads", "kv_bytes", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number from 1 on, got {value!r}")
        if self.threads > _MOST_THREADS:
            raise ConfigError(f"threads must be at most {_MOST_THREADS}, got {self.threads}")
        try:
            self.grid.check(self.chunk_tokens)
        except ValueError as error:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens}: {error}") from error

    def load(
        self, model: str | Path, device: torch.device, *, onto: torch.device | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The model in a folder, in the dtype that suits ``device``, on ``onto`` (default: there),
        and what of the engine's arguments is settled by now. Blocking."""
        folder = Path(model).expanduser()
        dtype = fast_dtype(device) if self.dtype == "auto" else self.dtype
        loaded = load_model(folder, dtype, device if onto is None else onto)
        layout = kv_layout(loaded.config, loaded.dtype, self.chunk_tokens)
        return loaded, {
            "identity": identity_of(loaded, folder, layout),
            "layout": layout,
            "tokenizer": load_tokenizer(folder),
            "grid": self.grid,
            "kv_bytes": self.kv_bytes,
            "threads": self.threads,
        }


def streams_of(device: torch.device) -> Streams:
    """The streams that go with a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()

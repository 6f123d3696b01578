"""What a layer of a tile costs on a GPU: FLOPs over a rate that saturates with the tile's width.

``seconds = linear / (peak * mfu(width)) + attention / (peak * mfu'(width)) + launches`` with
``mfu(w) = limit * w / (w + half_width)``: narrow tiles waste the machine, and attention makes late
tokens dearer (the form ``a + b * position`` per token). Knows no schedulers and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import Tile

__all__ = ["Device", "Machine", "ModelShape"]

_KV_ITEM_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. ``layer_parameters``: weights one token meets in one layer.

    ``narrow``: by how much a tile is thinned out before it meets a weight matrix (mixture of
    experts: experts / experts per token); 1 for dense models.
    """

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layer_parameters: float
    source: str
    narrow: float = 1.0

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, 16-bit."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _KV_ITEM_BYTES

    @property
    def linear_flops(self) -> float:
        """FLOPs of one token in the weight matrices of one layer."""
        return 2.0 * self.layer_parameters

    @property
    def attention_flops(self) -> float:
        """FLOPs of one token and one key position in one layer."""
        return 4.0 * self.query_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. ``peak``: dense bf16 FLOP/s of the datasheet; limits are shares of it.

    ``half_width``: tokens at which the rate is half its limit; ``launch_seconds``: what starting
    the kernels of one layer costs whatever the width.
    """

    name: str
    peak: float
    linear_limit: float
    linear_half_width: float
    attention_half_width: float
    source: str
    attention_limit: float = 0.5
    launch_seconds: float = 150e-6

    def layer_seconds(self, model: ModelShape, start: int, width: int) -> float:
        """Seconds of one layer for tokens ``[start, start + width)``."""
        linear = model.linear_flops * width
        attention = model.attention_flops * width * (start + width / 2)
        return (
            linear / (self.peak * _mfu(self.linear_limit, self.linear_half_width, width, model))
            + attention / (self.peak * _mfu(self.attention_limit, self.attention_half_width, width))
            + self.launch_seconds
        )


def _mfu(limit: float, half: float, width: int, model: ModelShape | None = None) -> float:
    thinned = width / (model.narrow if model else 1.0)
    return limit * thinned / (thinned + half)


class Machine:
    """A model on one or several (tensor-parallel) GPUs, in blocks of ``layers_per_block`` layers.

    Raises:
        ConfigError: the model's layers are not a multiple of the block.
    """

    def __init__(
        self, device: Device, model: ModelShape, *, layers_per_block: int = 4, gpus: int = 1
    ) -> None:
        if layers_per_block < 1 or model.layers % layers_per_block:
            raise ConfigError(
                f"--cells: {model.name} has {model.layers} layers, which blocks of "
                f"{layers_per_block} do not divide"
            )
        if gpus < 1:
            raise ConfigError(f"--preset: {gpus} GPUs cannot hold a model")
        self.device = device
        self.model = model
        self.layers_per_block = layers_per_block
        self.gpus = gpus
        self._seconds: dict[tuple[int, int], float] = {}

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        times = f"x{self.gpus}" if self.gpus > 1 else ""
        return f"{self.device.name}{times}:{self.model.name}"

    @property
    def layer_blocks(self) -> int:
        """Rows of the grid of cells."""
        return self.model.layers // self.layers_per_block

    @property
    def block_flops(self) -> tuple[float, float]:
        """FLOPs of one block per token, and per token and key position."""
        count = float(self.layers_per_block)
        return count * self.model.linear_flops, count * self.model.attention_flops

    def block_bytes(self, tokens: int) -> int:
        """KV bytes of one layer block of ``tokens`` tokens."""
        return tokens * self.model.token_bytes // self.layer_blocks

    def block_seconds(self, tile: Tile, now: float = 0.0) -> float:
        """Seconds of one layer block of ``tile``; the same at any time."""
        key = (tile.start, tile.stop)
        seconds = self._seconds.get(key)
        if seconds is None:
            one = self.device.layer_seconds(self.model, tile.start, tile.width)
            # Launches are not shared among tensor-parallel GPUs; the arithmetic is.
            launch = self.device.launch_seconds
            seconds = self.layers_per_block * ((one - launch) / self.gpus + launch)
            self._seconds[key] = seconds
        return seconds

    def drifting(self, factor: Callable[[float], float]) -> Callable[[Tile, float], float]:
        """The same machine whose layers take ``factor(now)`` times as long."""
        return lambda tile, now: self.block_seconds(tile) * factor(now)

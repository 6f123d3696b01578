"""Who holds what: a model's KV cache cut over pipeline stages and tensor-parallel ranks.

Layers are cut in contiguous ranges, KV heads in equal ones. With fewer KV heads than ranks several
ranks hold the same head, and one of them stores it. Stores know nothing of this: their objects are
named by absolute ranges, so what one cut has written another one can read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError
from cacheflow.types import Shard, Span

if TYPE_CHECKING:
    from cacheflow.types import KVLayout

__all__ = ["cut_heads", "cut_layers", "cut_layout"]


def cut_layout(layout: KVLayout, *, stages: int = 1, ranks: int = 1) -> list[list[Shard]]:
    """``[stage][rank]``: what each holds.

    Raises:
        ConfigError: the model cannot be cut like that; says which number does not fit.
    """
    return [
        [
            Shard(layout, layers, heads, stores)
            for heads, stores in cut_heads(layout.num_kv_heads, ranks)
        ]
        for layers in cut_layers(layout.num_layers, stages)
    ]


def cut_layers(layers: int, stages: int) -> list[Span]:
    """Contiguous ranges that differ by one layer at most, longer ones first.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ConfigError(f"{layers} layers cannot be cut into {stages} pipeline stages")
    short, longer = divmod(layers, stages)
    edges = [stage * short + min(stage, longer) for stage in range(stages + 1)]
    return [Span(first, stop) for first, stop in pairwise(edges)]


def cut_heads(heads: int, ranks: int) -> list[tuple[Span, bool]]:
    """The KV heads of each rank, and whether it is the one that stores them.

    Raises:
        ConfigError: neither number is a multiple of the other.
    """
    if ranks < 1 or (heads % ranks and ranks % heads):
        raise ConfigError(
            f"{heads} KV heads cannot be shared out among {ranks} tensor-parallel ranks: "
            "one number has to be a multiple of the other"
        )
    if ranks <= heads:
        each = heads // ranks
        return [(Span(rank * each, (rank + 1) * each), True) for rank in range(ranks)]
    copies = ranks // heads
    return [(Span(rank // copies, rank // copies + 1), rank % copies == 0) for rank in range(ranks)]

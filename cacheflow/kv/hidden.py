"""Boundary activations as objects: the hidden state of one chunk at the input of one layer.

Described by a :class:`~cacheflow.types.KVLayout` of their own, of one head whose K and V together
are as large as the hidden state, so that everything that holds for stored KV (runs, checksums,
tags, codecs, ranged reads) holds for them too. The payload is ``[token][hidden]``.
"""

from __future__ import annotations

from cacheflow.errors import ConfigError
from cacheflow.types import KVLayout, ObjectKind, Shard, Span

__all__ = ["boundary_shard"]


def boundary_shard(layout: KVLayout, hidden_size: int, dtype: str, layer: int) -> Shard:
    """What a stage that begins with ``layer`` stores beside its KV.

    ``layout``: the whole model's. ``dtype``: of the hidden state.

    Raises:
        ConfigError: the hidden size is odd.
    """
    if hidden_size % 2:
        raise ConfigError(f"a hidden size of {hidden_size} is odd: its activations are not stored")
    hidden = KVLayout(layout.num_layers, 1, hidden_size // 2, dtype, layout.chunk_tokens)
    return Shard(hidden, Span(layer, layer + 1), Span(0, 1), kind=ObjectKind.HIDDEN)

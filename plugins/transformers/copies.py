"""Bytes of stored chunks into pages and back: one strided copy a chunk, whatever its layers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from cacheflow.types import Span

if TYPE_CHECKING:
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import KVLayout, StagedPart

__all__ = ["as_torch_wants", "copy_in", "copy_out"]


def copy_in(layout: KVLayout, request: OpenRequest, part: StagedPart) -> None:
    """Staging -> page, on the current stream."""
    _cells(layout, request, part).copy_(_payload(layout, part), non_blocking=True)


def copy_out(layout: KVLayout, request: OpenRequest, part: StagedPart) -> None:
    """Page -> staging, on the current stream; padding is zeroed."""
    heads = _heads(layout, part)
    stride, used = layout.layer_stride(len(heads)), layout.layer_bytes(len(heads))
    if stride != used:
        blocks = torch.frombuffer(part.view, dtype=torch.uint8).view(len(part.layers), stride)
        blocks[:, used:].zero_()
    _payload(layout, part).copy_(_cells(layout, request, part), non_blocking=True)


def _payload(layout: KVLayout, part: StagedPart) -> torch.Tensor:
    """The bytes as ``[layers, 2, heads, C, D]``, skipping the padding behind each layer."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    heads = len(_heads(layout, part))
    shape = (len(part.layers), 2, heads, layout.chunk_tokens, layout.head_dim)
    row = layout.head_dim
    head = layout.chunk_tokens * row
    strides = (
        layout.layer_stride(heads) // layout.itemsize,
        heads * head,
        head,
        row,
        1,
    )
    return torch.frombuffer(as_torch_wants(part.view), dtype=dtype).as_strided(shape, strides)


def as_torch_wants(view: memoryview) -> memoryview | ctypes.Array[ctypes.c_char]:
    """The same memory: torch warns of what is read-only, as is what a tier lends, even when it only
    reads there."""
    if not view.readonly:
        return view
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return (ctypes.c_char * len(view)).from_address(address)


def _cells(layout: KVLayout, request: OpenRequest, part: StagedPart) -> torch.Tensor:
    """The chunk's place in its page, ``[layers, 2, heads, C, D]``."""
    start = part.chunk * layout.chunk_tokens
    page = request.page_at(start)
    first = start - page.start
    heads = _heads(layout, part)
    layers = slice(part.layers.start, part.layers.stop)
    some = slice(heads.start, heads.stop)
    return page.data[layers, :, some, first : first + layout.chunk_tokens]


def _heads(layout: KVLayout, part: StagedPart) -> Span:
    return Span(0, layout.num_kv_heads) if part.heads is None else part.heads

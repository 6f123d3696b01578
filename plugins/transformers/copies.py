"""Bytes of stored chunks into pages and back: one strided copy a chunk, one call a load."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import KVLayout, StagedPart

__all__ = ["Copies", "as_torch_wants", "copies_in", "copies_out", "joined"]


def copies_in(layout: KVLayout, request: OpenRequest, parts: Sequence[StagedPart]) -> Copies:
    """Staging -> pages, to be made on the current stream."""
    return Copies(
        [_cells(layout, request, part) for part in parts],
        [_payload(layout, part) for part in parts],
    )


def copies_out(layout: KVLayout, request: OpenRequest, parts: Sequence[StagedPart]) -> Copies:
    """Pages -> staging, to be made on the current stream; padding is zeroed."""
    return Copies(
        [_payload(layout, part) for part in parts],
        [_cells(layout, request, part) for part in parts],
        [padding for part in parts if (padding := _padding(layout, part)) is not None],
    )


def joined(some: Sequence[Copies]) -> Copies:
    """All of them in one."""
    if len(some) == 1:
        return some[0]
    return Copies(
        [target for copies in some for target in copies.targets],
        [source for copies in some for source in copies.sources],
        [padding for copies in some for padding in copies.padding],
    )


class Copies:
    """Prepared on any thread, made by calling it: in one call of torch's, so that the copying
    thread waits for the interpreter's lock once a load, not twice a chunk."""

    __slots__ = ("padding", "sources", "targets")

    def __init__(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        padding: Sequence[torch.Tensor] = (),
    ) -> None:
        self.targets, self.sources, self.padding = targets, sources, padding

    def __call__(self) -> None:
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)
        for each in self.padding:
            each.zero_()


def _padding(layout: KVLayout, part: StagedPart) -> torch.Tensor | None:
    """What is left behind each layer, ``[layers, bytes]``, if anything."""
    heads = _heads(layout, part)
    stride, used = layout.layer_stride(len(heads)), layout.layer_bytes(len(heads))
    if stride == used:
        return None
    blocks = torch.frombuffer(part.view, dtype=torch.uint8).view(len(part.layers), stride)
    return blocks[:, used:]


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

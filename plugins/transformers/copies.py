"""Bytes of stored chunks into pages and back: one strided copy a chunk, one call a load."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch

from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import KVLayout, StagedPart

__all__ = ["Copies", "copies_in", "copies_out", "elements", "joined"]


def copies_in(layout: KVLayout, request: OpenRequest, parts: Sequence[StagedPart]) -> Copies:
    """Staging -> pages, to be made on the current stream."""
    shapes = _shapes_of(layout)
    return Copies(
        [_cells(shapes, request, part) for part in parts],
        [_payload(shapes, part) for part in parts],
    )


def copies_out(layout: KVLayout, request: OpenRequest, parts: Sequence[StagedPart]) -> Copies:
    """Pages -> staging, to be made on the current stream; padding is zeroed."""
    shapes = _shapes_of(layout)
    return Copies(
        [_payload(shapes, part) for part in parts],
        [_cells(shapes, request, part) for part in parts],
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


_Shape: TypeAlias = "tuple[int, int, int, int, int]"


class _Shapes:
    """Shape ``[layers, 2, heads, C, D]`` of parts and their strides in a payload: there are few of
    them, asked for again and again on the event loop."""

    __slots__ = ("_known", "_strides", "chunk_tokens", "dtype", "heads", "layout")

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.chunk_tokens = layout.chunk_tokens
        self.heads = layout.num_kv_heads
        self._known: dict[tuple[int, int], _Shape] = {}
        self._strides: dict[int, _Shape] = {}

    def of(self, part: StagedPart) -> _Shape:
        """The shape of ``part``."""
        heads = self.heads if part.heads is None else len(part.heads)
        size = len(part.layers), heads
        shape = self._known.get(size)
        if shape is None:
            shape = self._known[size] = (size[0], 2, heads, self.chunk_tokens, self.layout.head_dim)
        return shape

    def strides(self, heads: int) -> _Shape:
        """In elements, skipping the padding behind each layer."""
        strides = self._strides.get(heads)
        if strides is None:
            layout, row = self.layout, self.layout.head_dim
            layer, head = layout.layer_stride(heads) // layout.itemsize, layout.chunk_tokens * row
            strides = self._strides[heads] = (layer, heads * head, head, row, 1)
        return strides


@lru_cache(maxsize=64)
def _shapes_of(layout: KVLayout) -> _Shapes:
    return _Shapes(layout)


def _payload(shapes: _Shapes, part: StagedPart) -> torch.Tensor:
    """The bytes of a part, as they lie in its payload."""
    shape = shapes.of(part)
    return elements(part.view, shapes.dtype).as_strided(shape, shapes.strides(shape[2]))


def elements(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The same memory, flat. It may be read-only, as is what a tier lends: then it is read only."""
    return torch.frombuffer(view, dtype=dtype)


def _hear_the_warning() -> None:
    """torch warns, once a process, of memory that cannot be written, even of who only reads there.
    Going round that costs more for every chunk than all else that is done for it here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elements(memoryview(b"0"), torch.uint8)


_hear_the_warning()


def _cells(shapes: _Shapes, request: OpenRequest, part: StagedPart) -> torch.Tensor:
    """The chunk's place in its page."""
    start = part.chunk * shapes.chunk_tokens
    page, shape, at = request.page_at(start), shapes.of(part), part.layers.start
    first, head = start - page.start, 0 if part.heads is None else part.heads.start
    layers, _, heads, width, _ = page.shape
    if at + shape[0] > layers or head + shape[2] > heads or first + shape[3] > width:
        raise ValueError(f"chunk {part.chunk}, {part.layers}, {part.heads} is not in its page")
    a_layer, _, a_head, a_token, _ = strides = page.strides
    place = page.offset + at * a_layer + head * a_head + first * a_token
    # One call to torch, where slicing makes five.
    return page.data.as_strided(shape, strides, place)


def _heads(layout: KVLayout, part: StagedPart) -> Span:
    return Span(0, layout.num_kv_heads) if part.heads is None else part.heads

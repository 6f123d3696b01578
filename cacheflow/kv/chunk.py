"""The stored chunk: a header that describes and checksums itself, then the payload.

The payload is ``[layer][k, v][head][token][dim]``, every layer block on a page boundary, so that a
range of layers is one read that can be checked alone. Writing an object whose payload is opaque to
others (an engine's own packing) needs a ``layout_id`` other than ``canonical``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv.checksums import run_checksums
from cacheflow.kv.header import decode_header, encode_header
from cacheflow.types import NO_ID, ChecksumKind, ChunkInfo, KVLayout, ObjectKey, Segment, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Stamp", "check_layout", "seal", "verify"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who stores: what a writer puts into every chunk besides its content."""

    model_id: bytes = NO_ID
    """From :func:`cacheflow.kv.model_id`."""
    tenant_id: bytes = NO_ID
    """From :func:`cacheflow.kv.tenant_id`."""


_NOBODY: Final = Stamp()


def seal(
    key: ObjectKey,
    layout: KVLayout,
    payload: memoryview,
    *,
    grid_id: str,
    segments: Sequence[Segment],
    canonical: bool,
    stamp: Stamp = _NOBODY,
    lossy: bool = False,
    checksum_kind: ChecksumKind = ChecksumKind.XXH3,
    layout_id: str = "canonical",
) -> tuple[ChunkInfo, bytes]:
    """Checksum ``payload`` and describe it; its padding becomes zeros, which are checksummed too.

    Staging memory is used again and again: without the zeros the padding would carry whatever
    another request left there into the store. ``lossy``: the values were computed from such that a
    lossy codec had changed (lossy segments say so as well). Returns the info and the encoded
    header; the object is ``header + payload``.

    Raises:
        ValueError: the payload's size is not what the key's ranges and the layout make it, its
            padding is neither zero nor writable, or the header's fields are over its limits.
    """
    heads = len(key.heads)
    if len(payload) != layout.payload_bytes(len(key.layers), heads):
        raise ValueError(f"payload of {len(payload)} bytes does not fit {key!r} of {layout!r}")
    _clear_padding(payload, layout.layer_bytes(heads), layout.layer_stride(heads))
    sums = run_checksums(
        checksum_kind,
        payload,
        run=layout.head_bytes,
        runs=2 * heads,
        stride=layout.layer_stride(heads),
    )
    info = ChunkInfo(
        key=key,
        layout=layout,
        grid_id=grid_id,
        segments=tuple(segments),
        canonical=canonical,
        checksum_kind=checksum_kind,
        layout_id=layout_id,
        checksums=struct.pack(f"<{len(sums)}Q", *sums),
        payload_offset=0,
        nbytes=0,
        model_id=stamp.model_id,
        tenant_id=stamp.tenant_id,
        lossy=lossy or any(segment.lossy for segment in segments),
    )
    header = encode_header(info)
    return decode_header(header), header


def check_layout(info: ChunkInfo, layout: KVLayout, layout_id: str = "canonical") -> None:
    """Raise IntegrityError unless the object's geometry and dtype are those of ``layout``."""
    if info.layout != layout:
        raise IntegrityError(f"stored with {info.layout}, the model has {layout}")
    if info.layout_id != layout_id:
        raise IntegrityError(f"stored in layout {info.layout_id!r}, not {layout_id!r}")


def verify(info: ChunkInfo, layers: Span, data: memoryview) -> None:
    """Check ``data``, the layer blocks ``layers`` of the object, against the object's table.

    Raises:
        IntegrityError: naming the first layer, K or V, and head that does not match.
    """
    heads = len(info.key.heads)
    stride = info.layout.layer_stride(heads)
    if not info.key.layers.covers(layers) or len(data) != len(layers) * stride:
        raise IntegrityError(f"{len(data)} bytes are not layers {layers} of the object")
    runs = 2 * heads
    sums = run_checksums(
        info.checksum_kind, data, run=info.layout.head_bytes, runs=runs, stride=stride
    )
    first = (layers.start - info.key.layers.start) * runs
    if struct.pack(f"<{len(sums)}Q", *sums) == info.checksums[8 * first : 8 * (first + len(sums))]:
        return
    table = struct.unpack_from(f"<{len(sums)}Q", info.checksums, 8 * first)
    bad = next(i for i, (a, b) in enumerate(zip(sums, table, strict=True)) if a != b)
    layer, run = divmod(bad, runs)
    half = "K" if run < heads else "V"
    head = info.key.heads.start + run % heads
    raise IntegrityError(
        f"checksum of layer {layers.start + layer}, {half}, head {head} does not match"
    )


def _clear_padding(payload: memoryview, used: int, stride: int) -> None:
    zeros = bytes(stride - used)
    if not zeros:
        return
    for block in range(0, len(payload), stride):
        padding = payload[block + used : block + stride]
        if padding != zeros:
            if payload.readonly:
                raise ValueError("the padding of a read-only payload must be zeros")
            padding[:] = zeros

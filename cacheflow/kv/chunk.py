"""The stored chunk: a header that describes and checks itself, then the payload.

A raw payload is ``[layer][k, v][head][token][dim]``, every layer block on a page boundary, so that
a range of layers is one read that can be checked alone; an encoded one has a block for each layer
as well. Writing an object whose payload is opaque to others (an engine's own packing) needs a
``layout_id`` other than ``canonical``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv.checksums import checksum, run_checksums
from cacheflow.kv.coding import encode_payload
from cacheflow.kv.header import decode_header, encode_header
from cacheflow.types import (
    NO_ID,
    ChecksumKind,
    ChunkInfo,
    Codec,
    KVLayout,
    ObjectKey,
    Segment,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.kv.auth import ChunkAuth
    from cacheflow.types import ChunkKey

__all__ = ["Stamp", "check_layout", "check_stamp", "restamp", "seal", "verify", "verify_heads"]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who stores: what a writer puts into every chunk and a reader looks for, whatever is in it."""

    model_id: bytes = NO_ID
    """From :func:`cacheflow.kv.model_id`."""
    tenant_id: bytes = NO_ID
    """From :func:`cacheflow.kv.tenant_id`."""
    auth: ChunkAuth | None = None
    """Chunks are authenticated, and others are refused."""


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
    codec: Codec = Codec.RAW,
    checksum_kind: ChecksumKind = ChecksumKind.XXH3,
    layout_id: str = "canonical",
) -> tuple[ChunkInfo, bytes]:
    """Encode ``payload`` in place, check- and describe it: the object is the header returned and
    the first ``info.nbytes - info.payload_offset`` bytes of ``payload``.

    Its padding becomes zeros, which are checksummed too: staging memory is used again and again,
    and the padding would carry whatever another request left there into the store. ``lossy``: the
    values were computed from such that a lossy codec had changed (lossy segments say so as well).
    What a lossy ``codec`` really changed is lossy and not canonical, whatever was said.

    Raises:
        ValueError: the payload's size is not what the key's ranges and the layout make it, it has
            to be changed and cannot be, a lossy codec is to encode what only an engine
            understands, or the header's fields are over its limits.
    """
    heads = len(key.heads)
    if len(payload) != layout.payload_bytes(len(key.layers), heads):
        raise ValueError(f"payload of {len(payload)} bytes does not fit {key!r} of {layout!r}")
    codec, lengths = _encode(codec, key, layout, payload, layout_id)
    lossy = lossy or codec.is_lossy or any(segment.lossy for segment in segments)
    info = ChunkInfo(
        key=key,
        layout=layout,
        grid_id=grid_id,
        segments=tuple(segments),
        canonical=canonical and not codec.is_lossy,
        checksum_kind=checksum_kind,
        layout_id=layout_id,
        checksums=b"",
        payload_offset=0,
        nbytes=0,
        model_id=stamp.model_id,
        tenant_id=stamp.tenant_id,
        lossy=lossy,
        codec=codec,
        lengths=struct.pack(f"<{len(lengths)}Q", *lengths),
    )
    info = _checked(info, payload[: info.layer_range(key.layers)[1]], stamp)
    header = encode_header(info)
    return decode_header(header), header


def restamp(
    info: ChunkInfo, chunk: ChunkKey, stamp: Stamp, payload: memoryview
) -> tuple[ChunkInfo, bytes]:
    """The header of the object ``info``, whose stored ``payload`` was verified, under the key and
    stamp of another tenant of the same model."""
    key = replace(info.key, chunk=chunk)
    info = replace(info, key=key, tenant_id=stamp.tenant_id, macs=b"", mac=b"")
    if stamp.auth is not None:
        info = replace(info, macs=stamp.auth.block_tags(info, key.layers, payload))
        info = replace(info, mac=stamp.auth.header_tag(info))
    header = encode_header(info)
    return decode_header(header), header


def check_layout(info: ChunkInfo, layout: KVLayout, layout_id: str = "canonical") -> None:
    """Raise IntegrityError unless the object's geometry and dtype are those of ``layout``."""
    if info.layout != layout:
        raise IntegrityError(f"stored with {info.layout}, the model has {layout}")
    if info.layout_id != layout_id:
        raise IntegrityError(f"stored in layout {info.layout_id!r}, not {layout_id!r}")


def check_stamp(info: ChunkInfo, stamp: Stamp) -> None:
    """Raise IntegrityError if the object says it is another model's or tenant's, or if it has to be
    authenticated and is not. Some 20 us where it has to be."""
    for what, theirs, ours in (
        ("model", info.model_id, stamp.model_id),
        ("tenant", info.tenant_id, stamp.tenant_id),
    ):
        if theirs != ours and NO_ID not in (theirs, ours):
            raise IntegrityError(f"it is another {what}'s, by its header")
    if stamp.auth is not None:
        stamp.auth.check_header(info)


def verify(info: ChunkInfo, layers: Span, data: memoryview, auth: ChunkAuth | None = None) -> None:
    """Check ``data``, the layer blocks ``layers`` of the object as stored: against the tags with
    ``auth`` (:func:`check_stamp` is about the header), else against the checksums.

    Raises:
        IntegrityError: naming the first layer, K or V, and head that does not match.
    """
    if not info.key.layers.covers(layers) or len(data) != info.layer_range(layers)[1]:
        raise IntegrityError(f"{len(data)} bytes are not layers {layers} of the object")
    if auth is not None:
        auth.check_blocks(info, layers, data)
        return
    sums = _checksums(info, layers, data)
    runs = len(info.checksums) // 8 // len(info.key.layers)
    first = (layers.start - info.key.layers.start) * runs
    if struct.pack(f"<{len(sums)}Q", *sums) == info.checksums[8 * first : 8 * (first + len(sums))]:
        return
    table = struct.unpack_from(f"<{len(sums)}Q", info.checksums, 8 * first)
    bad = next(i for i, (a, b) in enumerate(zip(sums, table, strict=True)) if a != b)
    layer, run = divmod(bad, runs)
    heads = len(info.key.heads)
    where = f"layer {layers.start + layer}"
    if info.codec is Codec.RAW:
        where += f", {'K' if run < heads else 'V'}, head {info.key.heads.start + run % heads}"
    raise IntegrityError(f"checksum of {where} does not match")


def verify_heads(info: ChunkInfo, layer: int, heads: Span, data: memoryview) -> None:
    """Check K and V of some heads of one layer of a raw object, read by ``info.head_ranges`` to
    their places in ``data``.

    Raises:
        IntegrityError: naming the layer, K or V, and head that does not match.
    """
    run, theirs = info.layout.head_bytes, len(info.key.heads)
    table = (layer - info.key.layers.start) * 2 * theirs
    for half, (_, nbytes, place) in enumerate(info.head_ranges(layer, heads)):
        for number, head in enumerate(heads):
            first = place + number * run
            stop = place + nbytes if head == heads.stop - 1 else first + run
            at = table + half * theirs + head - info.key.heads.start
            (expected,) = struct.unpack_from("<Q", info.checksums, 8 * at)
            if checksum(info.checksum_kind, data[first:stop]) != expected:
                name = "V" if half else "K"
                raise IntegrityError(f"checksum of layer {layer}, {name}, head {head} is wrong")


def _encode(
    codec: Codec, key: ObjectKey, layout: KVLayout, payload: memoryview, layout_id: str
) -> tuple[Codec, list[int]]:
    """The codec that was of use, and the lengths of the blocks it made."""
    heads = len(key.heads)
    if codec.is_lossy and layout_id != "canonical":
        raise ValueError(f"{codec} needs numbers, and layout {layout_id!r} is an engine's own")
    if codec is not Codec.RAW:
        if payload.readonly:
            raise ValueError("a payload is encoded in place: it must be writable")
        lengths = encode_payload(codec, layout, heads, payload)
        if min(lengths) < layout.layer_bytes(heads):
            return codec, lengths
    _clear_padding(payload, layout.layer_bytes(heads), layout.layer_stride(heads))
    return Codec.RAW, []


def _checked(info: ChunkInfo, payload: memoryview, stamp: Stamp) -> ChunkInfo:
    """With the tables of checksums and tags."""
    sums = _checksums(info, info.key.layers, payload)
    info = replace(info, checksums=struct.pack(f"<{len(sums)}Q", *sums))
    if stamp.auth is None:
        return info
    info = replace(info, macs=stamp.auth.block_tags(info, info.key.layers, payload))
    return replace(info, mac=stamp.auth.header_tag(info))


def _checksums(info: ChunkInfo, layers: Span, data: memoryview) -> list[int]:
    if info.codec is not Codec.RAW:
        return [checksum(info.checksum_kind, block) for block in _blocks(info, layers, data)]
    heads = len(info.key.heads)
    return run_checksums(
        info.checksum_kind,
        data,
        run=info.layout.head_bytes,
        runs=2 * heads,
        stride=info.layout.layer_stride(heads),
    )


def _blocks(info: ChunkInfo, layers: Span, data: memoryview) -> Iterator[memoryview]:
    at = 0
    for size in info.block_sizes(layers):
        yield data[at : at + size]
        at += size


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

"""The stored chunk: a self-describing, checksummed header, then the payload.

Byte layout (all little-endian)::

    magic "CFLWKV1\\n" | u32 header bytes | u32 body bytes | u64 xxh3 of the whole header
    body: u32 format, key digest, kind, layer and head ranges, geometry, flags, then
          length-prefixed dtype, checksum kind, layout id, grid id, segments and
          the table (one u64 checksum per (layer, K/V, head) run)
    zeros up to a multiple of 4096 | payload [layer][k, v][head][token][dim]

The header checksum covers every byte of the header but itself, padding included; the table
covers every byte of the payload. No pickle, no code, no sizes trusted before they are bounded.
Writing an object whose payload is opaque to others (an engine's own packing) needs a
``layout_id`` other than ``canonical``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from cacheflow.errors import IntegrityError
from cacheflow.kv.checksums import WSUM_WORD, run_checksums
from cacheflow.types import (
    DTYPE_BYTES,
    PAGE,
    ChecksumKind,
    ChunkInfo,
    ChunkKey,
    KVLayout,
    ObjectKey,
    ObjectKind,
    Segment,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CHUNK_FORMAT",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "check_layout",
    "decode_header",
    "encode_header",
    "header_size",
    "seal",
    "verify",
]

CHUNK_FORMAT: Final = 1
PREFIX_BYTES: Final = 24
MAX_HEADER_BYTES: Final = 4 << 20
_MAGIC: Final = b"CFLWKV1\n"
_PREFIX: Final = struct.Struct("<8sIIQ")
_FIXED: Final = struct.Struct("<I32s4I4IB")
_SEGMENT: Final = struct.Struct("<QQQ")
_MAX_TEXT: Final = 512
_MAX_SEGMENTS: Final = 4096
_CANONICAL_FLAG: Final = 1


def seal(
    key: ObjectKey,
    layout: KVLayout,
    payload: memoryview,
    *,
    grid_id: str,
    segments: Sequence[Segment],
    canonical: bool,
    checksum_kind: ChecksumKind = ChecksumKind.XXH3,
    layout_id: str = "canonical",
) -> tuple[ChunkInfo, bytes]:
    """Checksum ``payload`` and describe it; its padding becomes zeros, which are checksummed too.

    Staging memory is used again and again: without the zeros the padding would carry whatever
    another request left there into the store. Returns the info and the encoded header; the object
    is ``header + payload``.

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
    )
    header = encode_header(info)
    return decode_header(header), header


def encode_header(info: ChunkInfo) -> bytes:
    """The header of ``info`` (its ``payload_offset`` and ``nbytes`` are what this makes them).

    Raises:
        ValueError: a field is over its limit, so the header could not be read again.
    """
    key, layout = info.key, info.layout
    if len(info.segments) > _MAX_SEGMENTS:
        raise ValueError(f"{len(info.segments)} segments are over the limit of {_MAX_SEGMENTS}")
    fixed = _FIXED.pack(
        CHUNK_FORMAT,
        key.chunk.digest,
        key.layers.start,
        key.layers.stop,
        key.heads.start,
        key.heads.stop,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.chunk_tokens,
        _CANONICAL_FLAG if info.canonical else 0,
    )
    texts = (key.kind.value, layout.dtype, info.checksum_kind.value, info.layout_id, info.grid_id)
    segments = b"".join(_SEGMENT.pack(s.start, s.stop, s.width) for s in info.segments)
    body = fixed + b"".join(_text(text) for text in texts)
    body += struct.pack("<I", len(info.segments)) + segments
    body += struct.pack("<I", len(info.checksums) // 8) + info.checksums
    size = _header_bytes(len(body))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes is over the limit of {MAX_HEADER_BYTES}")
    rest = body.ljust(size - PREFIX_BYTES, b"\0")
    lengths = struct.pack("<II", size, len(body))
    return _PREFIX.pack(_MAGIC, size, len(body), _header_sum(lengths, rest)) + rest


def header_size(first: bytes | bytearray | memoryview) -> int:
    """Bytes of the header that begins with ``first`` (at least :data:`PREFIX_BYTES` of it).

    Raises:
        IntegrityError: it is not a chunk, or claims a size over :data:`MAX_HEADER_BYTES`.
    """
    if len(first) < PREFIX_BYTES:
        raise IntegrityError(f"truncated: {len(first)} bytes are no chunk header")
    magic, size, body, _ = _PREFIX.unpack_from(first)
    if magic != _MAGIC:
        raise IntegrityError("not a CacheFlow chunk (or one of another format version)")
    if size != _header_bytes(body) or size > MAX_HEADER_BYTES:
        raise IntegrityError(f"header claims {size} bytes with a body of {body}")
    return int(size)


def decode_header(
    data: bytes | bytearray | memoryview, *, expect: ObjectKey | None = None
) -> ChunkInfo:
    """Parse a header; ``data`` may go on into the payload.

    Raises:
        IntegrityError: truncated, altered, of another version or geometry, or not ``expect``.
    """
    size = header_size(data)
    if len(data) < size:
        raise IntegrityError(f"truncated: {len(data)} of {size} header bytes")
    header = bytes(data[:size])
    _, _, body_size, stored = _PREFIX.unpack_from(header)
    if _header_sum(header[8:16], header[PREFIX_BYTES:]) != stored:
        raise IntegrityError("header checksum does not match")
    try:
        info = _parse(header[PREFIX_BYTES : PREFIX_BYTES + body_size], size)
    except (ValueError, KeyError, struct.error) as error:
        raise IntegrityError(f"header is malformed: {error}") from error
    if expect is not None and info.key != expect:
        raise IntegrityError("the object is another one than its name says")
    return info


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


def _header_bytes(body: int) -> int:
    return -(-(PREFIX_BYTES + body) // PAGE) * PAGE


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


def _header_sum(lengths: bytes, rest: bytes) -> int:
    return xxh3_64_intdigest(lengths + rest)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > _MAX_TEXT:
        raise ValueError(f"{text[:40]!r}... is longer than {_MAX_TEXT} bytes")
    return struct.pack("<I", len(data)) + data


class _Cursor:
    """Reads a body front to back; every step is bounds-checked before it copies."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("a field reaches over the end")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, limit: int) -> int:
        (value,) = struct.unpack("<I", self.take(4))
        if value > limit:
            raise ValueError(f"a count of {value} is over the limit of {limit}")
        return int(value)

    def text(self) -> str:
        return self.take(self.number(_MAX_TEXT)).decode()

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("bytes are left over")


def _parse(body: bytes, size: int) -> ChunkInfo:
    version, digest, *numbers, flags = _FIXED.unpack_from(body)
    if version != CHUNK_FORMAT:
        raise ValueError(f"format version {version}, this is version {CHUNK_FORMAT}")
    if flags & ~_CANONICAL_FLAG:
        raise ValueError(f"unknown flags {flags:#x}")
    l0, l1, h0, h1, num_layers, num_heads, head_dim, chunk_tokens = numbers
    cursor = _Cursor(body, _FIXED.size)
    kind, dtype, checksum_kind, layout_id, grid_id = (cursor.text() for _ in range(5))
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    layout = KVLayout(num_layers, num_heads, head_dim, dtype, chunk_tokens)
    key = ObjectKey(ChunkKey(digest), Span(l0, l1), Span(h0, h1), ObjectKind(kind))
    if not (l0 < l1 <= num_layers and h0 < h1 <= num_heads):
        raise ValueError(f"ranges {key.layers}, {key.heads} are not inside {layout}")
    if checksum_kind == ChecksumKind.WSUM and layout.head_bytes % WSUM_WORD:
        raise ValueError(f"runs of {layout.head_bytes} bytes cannot have wsum checksums")
    count = cursor.number(_MAX_SEGMENTS)
    segments = tuple(Segment(*_SEGMENT.unpack(cursor.take(24))) for _ in range(count))
    runs = len(key.layers) * 2 * len(key.heads)
    if cursor.number(MAX_HEADER_BYTES // 8) != runs:
        raise ValueError(f"the table does not have {runs} entries")
    checksums = cursor.take(8 * runs)
    cursor.end()
    return ChunkInfo(
        key=key,
        layout=layout,
        grid_id=grid_id,
        segments=segments,
        canonical=bool(flags & _CANONICAL_FLAG),
        checksum_kind=ChecksumKind(checksum_kind),
        layout_id=layout_id,
        checksums=checksums,
        payload_offset=size,
        nbytes=size + layout.payload_bytes(len(key.layers), len(key.heads)),
    )

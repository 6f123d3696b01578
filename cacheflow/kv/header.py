"""The header of a stored chunk: what is in it, byte by byte, and how it is checked.

Byte layout of format 2 (all little-endian)::

    magic "CFLWKV2\\n" | u32 header bytes | u32 body bytes | u64 xxh3 of the whole header
    | tag of the header (16 bytes, zeros without authentication)
    body: u32 format, key digest, layer and head ranges, geometry, flags, model id, tenant id,
          then length-prefixed kind, dtype, checksum kind, layout id, grid id and codec,
          then counted: segments, checksums (u64), lengths (u64, encoded objects only) and
          tags of the layer blocks (16 bytes each, authenticated objects only)
    zeros up to a multiple of 4096

The checksum covers every byte of the header but itself, the tag every byte but those two. One
content has one encoding, so the tag can be checked from a decoded header. No pickle, no code, no
sizes trusted before they are bounded. Knows nothing of payloads: ``chunk`` does.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Final

from xxhash import xxh3_64_intdigest

from cacheflow.errors import IntegrityError
from cacheflow.kv.checksums import WSUM_WORD
from cacheflow.types import (
    DTYPE_BYTES,
    MAC_BYTES,
    PAGE,
    ChecksumKind,
    ChunkInfo,
    ChunkKey,
    Codec,
    KVLayout,
    ObjectKey,
    ObjectKind,
    Segment,
    Span,
)

__all__ = [
    "CHUNK_FORMAT",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "authenticated_bytes",
    "decode_header",
    "encode_header",
    "header_size",
]

CHUNK_FORMAT: Final = 2
PREFIX_BYTES: Final = 40
MAX_HEADER_BYTES: Final = 4 << 20
_MAGIC: Final = b"CFLWKV2\n"
_OTHER_FORMAT: Final = b"CFLWKV"
_PREFIX: Final = struct.Struct("<8sIIQ16s")
_FIXED: Final = struct.Struct("<I32s4I4II16s16s")
_SEGMENT: Final = struct.Struct("<QQQB")
_MAX_TEXT: Final = 512
_MAX_SEGMENTS: Final = 4096
_CANONICAL: Final = 1
_LOSSY: Final = 2
_NO_TAG: Final = bytes(MAC_BYTES)


def encode_header(info: ChunkInfo) -> bytes:
    """The header of ``info`` (its ``payload_offset`` and ``nbytes`` are what this makes them).

    Raises:
        ValueError: a field is over its limit, so the header could not be read again.
    """
    body = _body(info)
    size = _header_bytes(len(body))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes is over the limit of {MAX_HEADER_BYTES}")
    lengths = struct.pack("<II", size, len(body))
    tag = info.mac or _NO_TAG
    rest = tag + body.ljust(size - PREFIX_BYTES, b"\0")
    return _MAGIC + lengths + struct.pack("<Q", xxh3_64_intdigest(lengths + rest)) + rest


def authenticated_bytes(info: ChunkInfo) -> bytes:
    """What the tag of the header is about: all of it but the tag and the checksum."""
    body = _body(info)
    return _MAGIC + struct.pack("<II", _header_bytes(len(body)), len(body)) + body


def header_size(first: bytes | bytearray | memoryview) -> int:
    """Bytes of the header that begins with ``first`` (at least :data:`PREFIX_BYTES` of it).

    Raises:
        IntegrityError: it is not a chunk, or one of another format, or claims a size over
            :data:`MAX_HEADER_BYTES`.
    """
    if len(first) < PREFIX_BYTES:
        raise IntegrityError(f"truncated: {len(first)} bytes are no chunk header")
    magic, size, body, _, _ = _PREFIX.unpack_from(first)
    if magic != _MAGIC:
        if magic.startswith(_OTHER_FORMAT):
            found = magic[len(_OTHER_FORMAT) :].strip().decode("ascii", "replace")
            raise IntegrityError(
                f"a chunk of format {found}, this version reads format {CHUNK_FORMAT} only"
            )
        raise IntegrityError("not a CacheFlow chunk")
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
    _, _, body_size, stored, tag = _PREFIX.unpack_from(header)
    if xxh3_64_intdigest(header[8:16] + header[24:]) != stored:
        raise IntegrityError("header checksum does not match")
    end = PREFIX_BYTES + body_size
    if header.count(0, end) != size - end:
        raise IntegrityError("there is something in the padding of the header")
    try:
        info = _parse(header[PREFIX_BYTES:end], size, tag)
    except (ValueError, KeyError, struct.error) as error:
        raise IntegrityError(f"header is malformed: {error}") from error
    if expect is not None and info.key != expect:
        raise IntegrityError("the object is another one than its name says")
    return info


def _header_bytes(body: int) -> int:
    return -(-(PREFIX_BYTES + body) // PAGE) * PAGE


# -- writing ---------------------------------------------------------------------------------------


def _body(info: ChunkInfo) -> bytes:
    key, layout = info.key, info.layout
    if len(info.segments) > _MAX_SEGMENTS:
        raise ValueError(f"{len(info.segments)} segments are over the limit of {_MAX_SEGMENTS}")
    _check(info)
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
        _CANONICAL * info.canonical | _LOSSY * info.lossy,
        info.model_id,
        info.tenant_id,
    )
    kinds = (key.kind.value, layout.dtype, info.checksum_kind.value)
    texts = (*kinds, info.layout_id, info.grid_id, info.codec.value)
    segments = b"".join(_SEGMENT.pack(s.start, s.stop, s.width, s.lossy) for s in info.segments)
    counted = (
        (len(info.segments), segments),
        (len(info.checksums) // 8, info.checksums),
        (len(info.lengths) // 8, info.lengths),
        (len(info.macs) // MAC_BYTES, info.macs),
    )
    tables = (struct.pack("<I", count) + data for count, data in counted)
    return fixed + b"".join(map(_text, texts)) + b"".join(tables)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > _MAX_TEXT:
        raise ValueError(f"{text[:40]!r}... is longer than {_MAX_TEXT} bytes")
    return struct.pack("<I", len(data)) + data


# -- reading ---------------------------------------------------------------------------------------


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

    def table(self, entry: int) -> bytes:
        return self.take(entry * self.number(MAX_HEADER_BYTES // entry))

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("bytes are left over")


def _parse(body: bytes, size: int, tag: bytes) -> ChunkInfo:
    version, digest, *numbers, flags, model, tenant = _FIXED.unpack_from(body)
    if version != CHUNK_FORMAT:
        raise ValueError(f"format version {version}, this is version {CHUNK_FORMAT}")
    if flags & ~(_CANONICAL | _LOSSY):
        raise ValueError(f"unknown flags {flags:#x}")
    l0, l1, h0, h1, num_layers, num_heads, head_dim, chunk_tokens = numbers
    cursor = _Cursor(body, _FIXED.size)
    kind, dtype, checksum_kind, layout_id, grid_id, codec = (cursor.text() for _ in range(6))
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    segments = tuple(_segment(cursor) for _ in range(cursor.number(_MAX_SEGMENTS)))
    checksums, lengths, macs = cursor.table(8), cursor.table(8), cursor.table(MAC_BYTES)
    cursor.end()
    info = ChunkInfo(
        key=ObjectKey(ChunkKey(digest), Span(l0, l1), Span(h0, h1), ObjectKind(kind)),
        layout=KVLayout(num_layers, num_heads, head_dim, dtype, chunk_tokens),
        grid_id=grid_id,
        segments=segments,
        canonical=bool(flags & _CANONICAL),
        checksum_kind=ChecksumKind(checksum_kind),
        layout_id=layout_id,
        checksums=checksums,
        payload_offset=size,
        nbytes=0,
        model_id=model,
        tenant_id=tenant,
        lossy=bool(flags & _LOSSY),
        codec=Codec(codec),
        lengths=lengths,
        macs=macs,
        mac=tag if macs else b"",
    )
    if not macs and tag != _NO_TAG:
        raise ValueError("a tag without tags of the layer blocks")
    _check(info)
    return replace(info, nbytes=size + info.layer_range(info.key.layers)[1])


def _segment(cursor: _Cursor) -> Segment:
    start, stop, width, lossy = _SEGMENT.unpack(cursor.take(_SEGMENT.size))
    if lossy > 1:
        raise ValueError(f"unknown flags {lossy:#x} of a segment")
    return Segment(start, stop, width, bool(lossy))


def _check(info: ChunkInfo) -> None:
    """What has to agree between the fields, whoever made them."""
    key, layout = info.key, info.layout
    inside = key.layers.stop <= layout.num_layers and key.heads.stop <= layout.num_kv_heads
    if not (len(key.layers) and len(key.heads) and inside):
        raise ValueError(f"ranges {key.layers}, {key.heads} are not inside {layout}")
    encoded = info.codec is not Codec.RAW
    if info.checksum_kind is ChecksumKind.WSUM and not encoded and layout.head_bytes % WSUM_WORD:
        raise ValueError(f"runs of {layout.head_bytes} bytes cannot have wsum checksums")
    layers = len(key.layers)
    runs = layers if encoded else layers * 2 * len(key.heads)
    if len(info.checksums) != 8 * runs:
        raise ValueError(f"the table does not have {runs} entries")
    if len(info.lengths) != 8 * layers * encoded or len(info.macs) not in (0, MAC_BYTES * layers):
        raise ValueError(f"lengths and tags are not of {layers} layer blocks")
    most = layout.layer_bytes(len(key.heads))
    if not all(0 < length <= most for (length,) in struct.iter_unpack("<Q", info.lengths)):
        raise ValueError(f"the length of a block is not between 1 and {most} bytes")
    if not len(info.model_id) == len(info.tenant_id) == 16:
        raise ValueError("model and tenant ids have 16 bytes")
    if (info.codec.is_lossy and not info.lossy) or (info.lossy and info.canonical):
        raise ValueError("what is stored with loss has to say so and is never canonical")

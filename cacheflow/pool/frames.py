"""Frames of the pool's side channel: a fixed prefix, then one msgpack map.

::

    "CF" | u8 protocol version | u8 kind | u32 request number | u32 body bytes     (big-endian)
    body: a map from field names to integers, bytes, text, truth values, None and arrays of them

A reply has the kind of its request with the high bit set, or is an ERROR, and carries the request's
number. Every size is bounded before a byte of it is kept. What the fields of each kind are,
:mod:`cacheflow.pool.messages` says; nothing here knows.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import msgpack

from cacheflow.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FIRST_BODY",
    "FEW_VALUES",
    "MAX_BODY",
    "MAX_VALUES",
    "PREFIX_BYTES",
    "PROTOCOL",
    "REPLY",
    "Frame",
    "Kind",
    "decode_body",
    "decode_prefix",
    "encode_frame",
    "read_frame",
]

PROTOCOL: Final = 2
"""Version of the frames and of what they mean; peers of another version refuse each other."""
MAX_BODY: Final = 16 << 20
"""Bytes of a body."""
FIRST_BODY: Final = 256 << 10
"""Bytes of a body from somebody who has not said who he is yet."""
MAX_VALUES: Final = 1 << 18
"""Values in the arrays of a body: each takes far more memory, and time of the event loop, than the
byte that may stand for it."""
FEW_VALUES: Final = 1 << 14
"""In those of a request."""
_LONGEST: Final = 1 << 16
"""Of one array."""
_FIELDS: Final = 32
REPLY: Final = 0x80
_MAGIC: Final = b"CF"
_PREFIX: Final = struct.Struct(">2sBBII")
PREFIX_BYTES: Final = _PREFIX.size


class Kind(IntEnum):
    """What a frame asks for."""

    HELLO = 1
    LOOKUP = 2
    LEASE = 3
    RELEASE = 4
    ALLOC = 5
    COMMIT = 6
    ABORT = 7
    DELETE = 8
    SCAN = 9
    STAT = 10
    ERROR = 0x7F


@dataclass(frozen=True, slots=True)
class Frame:
    """``kind`` is that of the request, also in a reply to it; ERROR is a reply always."""

    kind: Kind
    is_reply: bool
    number: int
    body: bytes


def encode_frame(
    kind: Kind, number: int, fields: Mapping[str, Any], *, is_reply: bool = False
) -> bytes:
    """One frame.

    Raises:
        ValueError: the body would be larger than :data:`MAX_BODY`.
    """
    body = msgpack.packb(fields, use_bin_type=True)
    if len(body) > MAX_BODY:
        raise ValueError(f"a body of {len(body)} bytes is over the limit of {MAX_BODY}")
    code = kind | REPLY if is_reply else kind
    return _PREFIX.pack(_MAGIC, PROTOCOL, code, number, len(body)) + bytes(body)


def decode_prefix(data: bytes, most: int = MAX_BODY) -> tuple[Kind, bool, int, int]:
    """``(kind, is_reply, number, body bytes)``.

    Raises:
        IntegrityError: it is no prefix of this protocol version, or announces more than ``most``.
    """
    if len(data) != PREFIX_BYTES:
        raise IntegrityError(f"truncated: {len(data)} bytes are no frame prefix")
    magic, version, code, number, size = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise IntegrityError("not a frame of a CacheFlow pool")
    if version != PROTOCOL:
        raise IntegrityError(f"protocol version {version}, this is version {PROTOCOL}")
    if size > most:
        raise IntegrityError(f"a body of {size} bytes is over the limit of {most}")
    try:
        kind = Kind(code & ~REPLY)
    except ValueError:
        raise IntegrityError(f"unknown kind of frame {code:#x}") from None
    return kind, bool(code & REPLY), number, size


def decode_body(body: bytes, most: int = MAX_VALUES) -> dict[str, Any]:
    """The map in ``body``; arrays are tuples, with ``most`` values in all.

    Raises:
        IntegrityError: it is anything else.
    """
    left, maps = most, 0

    def counted(values: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal left
        left -= len(values)
        if left < 0:
            raise ValueError(f"over {most} values")
        return values

    def alone(fields: dict[str, Any]) -> dict[str, Any]:
        nonlocal maps
        maps += 1
        if maps > 1:
            raise ValueError("a map within another")
        return fields

    try:
        fields = msgpack.unpackb(
            body,
            use_list=False,
            raw=False,
            strict_map_key=True,
            list_hook=counted,
            object_hook=alone,
            max_array_len=min(most, _LONGEST),
            max_map_len=_FIELDS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise IntegrityError(f"body is malformed: {error}") from None
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise IntegrityError("body is not a map of named fields")
    return fields


async def read_frame(reader: asyncio.StreamReader, most: int = MAX_BODY) -> Frame | None:
    """The next frame, or None at the end of the stream.

    Raises:
        IntegrityError: what comes is no frame, or ends in the middle of one.
        OSError: the connection broke.
    """
    try:
        prefix = await reader.readexactly(PREFIX_BYTES)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise IntegrityError("the stream ends in the middle of a frame") from None
    kind, is_reply, number, size = decode_prefix(prefix, most)
    try:
        body = await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise IntegrityError("the stream ends in the middle of a frame") from None
    return Frame(kind, is_reply, number, body)

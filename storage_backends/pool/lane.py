"""What a lane of the tcp transport says: fixed records on a blocking socket, then bare bytes.

::

    client: "CFL1" | 32 bytes that the store gave it in its HELLO
    then    request: "CFLQ" | u32 operation | u64 generation | u64 offset | u64 bytes  (big-endian)
            (writing: the bytes)
    store:  reply: "CFLR" | u32 status | u64 bytes
            (reading: the bytes)

Both ends block in the kernel, each in a thread of its own: whole pieces are copied by one call
with the interpreter's lock released, straight from the arena and straight into the caller's memory.
"""

from __future__ import annotations

import socket
import ssl
import struct
from enum import IntEnum
from typing import Final, TypeAlias

from cacheflow.errors import IntegrityError

__all__ = [
    "SECRET_BYTES",
    "Operation",
    "Socket",
    "Status",
    "greeting",
    "pack_reply",
    "pack_request",
    "prepare",
    "read_greeting",
    "read_reply",
    "read_request",
    "receive",
    "send",
]

Socket: TypeAlias = socket.socket
SECRET_BYTES: Final = 32
_GREETING: Final = b"CFL1"
_REQUEST: Final = struct.Struct(">4sIQQQ")
_REPLY: Final = struct.Struct(">4sIQ")
_ASK: Final = b"CFLQ"
_ANSWER: Final = b"CFLR"


class Operation(IntEnum):
    """What is asked for."""

    READ = 1
    WRITE = 2


class Status(IntEnum):
    """What came of it."""

    OK = 0
    DENIED = 1
    """No lease on that range (any more)."""


def prepare(connection: Socket, seconds: float) -> None:
    """No call lasts longer without progress; 0: for ever."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds or None)
        return
    connection.setblocking(True)
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def greeting(secret: bytes) -> bytes:
    """The first bytes of a lane."""
    return _GREETING + secret


def read_greeting(connection: Socket) -> bytes:
    """The secret. Raises IntegrityError if this is no lane, OSError if it broke."""
    data = bytearray(len(_GREETING) + SECRET_BYTES)
    receive(connection, memoryview(data))
    if not data.startswith(_GREETING):
        raise IntegrityError("not a lane of a CacheFlow pool")
    return bytes(data[len(_GREETING) :])


def pack_request(operation: Operation, generation: int, offset: int, nbytes: int) -> bytes:
    """One request."""
    return _REQUEST.pack(_ASK, operation, generation, offset, nbytes)


def read_request(connection: Socket) -> tuple[Operation, int, int, int]:
    """``(operation, generation, offset, bytes)``; raises as :func:`read_greeting` does."""
    data = bytearray(_REQUEST.size)
    receive(connection, memoryview(data))
    magic, operation, generation, offset, nbytes = _REQUEST.unpack(data)
    if magic != _ASK or operation not in iter(Operation):
        raise IntegrityError("not a request of a lane")
    return Operation(operation), generation, offset, nbytes


def pack_reply(status: Status, nbytes: int) -> bytes:
    """One reply."""
    return _REPLY.pack(_ANSWER, status, nbytes)


def read_reply(connection: Socket, nbytes: int) -> Status:
    """The status; ``nbytes`` is what an OK has to be about. Raises as :func:`read_greeting`."""
    data = bytearray(_REPLY.size)
    receive(connection, memoryview(data))
    magic, status, got = _REPLY.unpack(data)
    if magic != _ANSWER or status not in iter(Status) or (status == Status.OK and got != nbytes):
        raise IntegrityError("not a reply to what was asked")
    return Status(status)


def receive(connection: Socket, view: memoryview) -> None:
    """Fill ``view``; raises ConnectionError where the other side ends first."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(view):
        try:
            got = connection.recv_into(view, len(view), flags)
        except BlockingIOError:
            raise TimeoutError("nothing came for too long") from None
        if not got:
            raise ConnectionError("the connection ended")
        view = view[got:]


def send(connection: Socket, view: memoryview | bytes) -> None:
    """All of ``view``."""
    try:
        connection.sendall(view)
    except BlockingIOError:
        raise TimeoutError("nothing could be sent for too long") from None

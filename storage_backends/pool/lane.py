"""What a lane of the tcp transport says: fixed records on a blocking socket, then bare bytes.

::

    client: "CFL2" | 32 bytes that the store gave it in its HELLO | padding
    then    request: "CFLQ" | u32 operation | u64 generation | u64 offset | u64 bytes  (big-endian)
            | padding (writing: the bytes)
    store:  reply: "CFLR" | u32 status | u64 bytes
            | padding (reading: the bytes)

Records are padded to 64 bytes: the kernel puts what follows behind them in its buffers, and copies
to an address that is no multiple of a cache line half as fast (1.1 against 0.75 ms for 4 MiB).

Both ends block in the kernel, each in a thread of its own: whole pieces are copied by one call
with the interpreter's lock released, straight from the arena and straight into the caller's memory.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
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
    "receive_reply",
    "send",
]

Socket: TypeAlias = socket.socket
SECRET_BYTES: Final = 32
_GREETING: Final = struct.Struct(f">4s{SECRET_BYTES}s28x")
_REQUEST: Final = struct.Struct(">4sIQQQ32x")
_REPLY: Final = struct.Struct(">4sIQ48x")
_HELLO: Final = b"CFL2"
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
    """No lease on that range (any more). The lane ends with it."""


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
    return _GREETING.pack(_HELLO, secret)


def read_greeting(connection: Socket, seconds: float) -> bytes:
    """The secret, all of which has to be there after ``seconds``. Raises IntegrityError if this is
    no lane, OSError if it broke."""
    data, got, until = bytearray(_GREETING.size), 0, time.monotonic() + seconds
    while got < len(data):
        if (left := until - time.monotonic()) <= 0.0:
            raise TimeoutError("it has not said whose it is")
        connection.settimeout(left)
        more = connection.recv_into(memoryview(data)[got:])
        if not more:
            raise ConnectionError("the connection ended")
        got += more
    magic, secret = _GREETING.unpack(data)
    if magic != _HELLO:
        raise IntegrityError("not a lane of a CacheFlow pool")
    return bytes(secret)


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
    return _status(data, nbytes)


def _status(data: bytearray | memoryview, nbytes: int) -> Status:
    magic, status, got = _REPLY.unpack(data)
    if magic != _ANSWER or status not in iter(Status) or (status == Status.OK and got != nbytes):
        raise IntegrityError("not a reply to what was asked")
    return Status(status)


def receive_reply(connection: Socket, view: memoryview) -> Status:
    """A reply and, if it is OK, what follows it into ``view``: on a bare socket by one call, so
    that the thread is woken, and takes the interpreter's lock, once. Raises as
    :func:`read_greeting`."""
    head = memoryview(bytearray(_REPLY.size))
    got = 0
    if not isinstance(connection, ssl.SSLSocket):
        try:
            got = connection.recvmsg_into([head, view], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("nothing came for too long") from None
        if not got:
            raise ConnectionError("the connection ended")
    receive(connection, head[got:])
    status = _status(head, len(view))
    if status is Status.OK:
        receive(connection, view[max(got - len(head), 0) :])
    return status


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


def send(connection: Socket, view: memoryview | bytes, *, more: bool = False) -> None:
    """All of ``view``; ``more`` follows at once, and they travel together: the other side is woken
    once and not twice."""
    flags = socket.MSG_MORE if more and not isinstance(connection, ssl.SSLSocket) else 0
    try:
        connection.sendall(view, flags)
    except BlockingIOError:
        raise TimeoutError("nothing could be sent for too long") from None

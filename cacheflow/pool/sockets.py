"""Connections whose other end went without a word: the kernel is told to find out.

A machine that loses power, or its network, says nothing; and a process that is stopped takes
nothing, though its kernel still answers. Neither ends a connection by itself, and what a store
keeps for a client (its place, a thread for each lane, the slots that are being sent) would be kept
for as long as the store lives.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from asyncio import StreamWriter

__all__ = ["end_sending", "watch_socket", "watch_stream"]

_PROBES: Final = 3


class _Options(Protocol):
    """A socket, or what asyncio gives for one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def watch_socket(connection: _Options, seconds: float) -> None:
    """The connection breaks if the other machine is silent, or takes nothing of what it is sent,
    for about so long. What the system does not know is left out."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, round(seconds / (_PROBES + 1)))
    for name, value in (
        ("TCP_KEEPIDLE", pause),
        ("TCP_KEEPINTVL", pause),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", round(1e3 * seconds)),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def end_sending(writer: StreamWriter) -> None:
    """The other side hears that there is no more to come, and may end the connection; below TLS,
    which cannot say so. What has not been sent yet would be lost: then it hears nothing."""
    connection = writer.get_extra_info("socket")
    if connection is None or writer.transport.get_write_buffer_size():
        return
    with suppress(OSError), socket.fromfd(connection.fileno(), connection.family, 0) as same:
        same.shutdown(socket.SHUT_WR)


def watch_stream(writer: StreamWriter, seconds: float) -> None:
    """The same for one of asyncio's."""
    if (connection := writer.get_extra_info("socket")) is not None:
        watch_socket(connection, seconds)

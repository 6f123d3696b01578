"""Bytes over a socket and nothing else: what the pool's tcp transport is compared with.

As a program it serves: to whoever connects, ``size`` bytes for each byte it receives.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["asyncio_copy", "running_reference", "thread_copy"]


_BLOCKS = 16
"""As many as the store has objects: one block sent again and again would come out of a cache."""


def serve(size: int) -> None:
    """Until it is killed; prints its port."""
    blocks = [memoryview(bytearray(b"x" * size)) for _ in range(_BLOCKS)]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def answer(connection: socket.socket) -> None:
        with connection:
            number = connection.fileno()  # each connection begins elsewhere
            while connection.recv(1):
                connection.sendall(blocks[number % _BLOCKS])
                number += 1

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


@contextmanager
def running_reference(size: int) -> Iterator[int]:
    """A server in a process of its own; gives its port."""
    command = [sys.executable, __file__, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def asyncio_copy(
    connections: Sequence[socket.socket], views: Sequence[memoryview], count: int
) -> None:
    """``count`` blocks on each connection, received on the event loop."""
    loop = asyncio.get_running_loop()

    async def one(connection: socket.socket, view: memoryview) -> None:
        for _ in range(count):
            await loop.sock_sendall(connection, b"1")
            left = view
            while left:
                left = left[await loop.sock_recv_into(connection, left) :]

    await asyncio.gather(*map(one, connections, views))


def thread_copy(connection: socket.socket, view: memoryview, count: int) -> None:
    """``count`` blocks, received by a thread that blocks in the kernel."""
    for _ in range(count):
        connection.sendall(b"1")
        left = view
        while left:
            left = left[connection.recv_into(left, len(left), socket.MSG_WAITALL) :]


if __name__ == "__main__":
    serve(int(sys.argv[1]))

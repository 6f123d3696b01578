"""The client's half of the tcp transport: a few blocking lanes to each store, each on a thread.

A thread copies whole pieces straight into the caller's memory with the interpreter's lock released;
the event loop has nothing to do with the bytes. Lanes are opened when they are first needed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cacheflow.cores import usable_cores
from cacheflow.errors import BackendError, IntegrityError
from cacheflow.storage_backends.pool import lane
from cacheflow.storage_backends.pool.channel import Refused
from cacheflow.storage_backends.pool.lane import Operation, Status
from cacheflow.storage_backends.pool.target import ANSWER, TcpTarget
from cacheflow.storage_backends.threads import IoThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from cacheflow.pool import Access, Piece, Target, Transport
    from cacheflow.types import Buffer

__all__ = ["TCP", "TcpLink", "TcpTransport"]

_MOST_LANES: Final = 4
_LEAST_LANES: Final = 2
"""To each store: enough for one connection to wait while another one is read."""
_CONNECT_SECONDS: Final = 2.0
_STALL_SECONDS: Final = 5.0
"""A lane on which nothing moves for so long is given up, whatever the deadline."""
_CLOSE_SECONDS: Final = 0.5


class TcpLink:
    """Lanes to one store."""

    def __init__(self, host: str, port: int, secret: bytes, tls: SSLContext | None) -> None:
        self._where = (host, port)
        self._secret = secret
        self._tls = tls
        self._threads = IoThreads(_lanes(), f"cacheflow-pool-tcp {host}:{port}")
        self._lock = threading.Lock()
        """Guards the lanes: threads take and give them, the loop cuts them."""
        self._free: list[socket.socket] = []
        self._used: set[socket.socket] = set()
        self.is_closed = False

    async def read(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        await self._move(Operation.READ, pieces, deadline)

    async def write(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        await self._move(Operation.WRITE, pieces, deadline)

    def close(self) -> None:
        """Every lane is cut, so what is blocked on one comes back at once."""
        with self._lock:
            self.is_closed = True
            lanes = [*self._free, *self._used]
        for connection in lanes:
            _cut(connection)

    async def aclose(self) -> None:
        """Idempotent; bounded even with a thread that hangs."""
        self.close()
        await self._threads.aclose(_CLOSE_SECONDS)
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    async def _move(self, operation: Operation, pieces: Sequence[Piece], deadline: float) -> None:
        if self.is_closed:  # its threads may be gone, too
            raise self._error(operation, "the link was closed")
        for piece in pieces:
            piece.buffer.hold.acquire()

        def let_go() -> None:
            for piece in pieces:
                piece.buffer.hold.release()

        def work() -> None:
            try:
                self._work(operation, pieces)
            finally:
                let_go()

        try:
            job = self._threads.start(work, let_go)
        except BaseException:
            let_go()
            raise
        try:
            async with asyncio.timeout(deadline):
                await job.done
        except TimeoutError:
            self._threads.withdraw(job)
            raise self._error(operation, f"not there after {deadline:.3g} s") from None
        except (OSError, IntegrityError) as error:
            raise self._error(operation, str(error)) from error
        except BaseException:
            self._threads.withdraw(job)
            raise

    # -- on threads ----------------------------------------------------------------------------

    def _work(self, operation: Operation, pieces: Sequence[Piece]) -> None:
        connection = self._take()
        try:
            if operation is Operation.READ:
                _read(connection, pieces)
            else:
                _write(connection, pieces)
        except BaseException:
            self._drop(connection)
            raise
        with self._lock:
            if not self.is_closed:
                self._used.discard(connection)
                self._free.append(connection)
                return
        self._drop(connection)

    def _take(self) -> socket.socket:
        with self._lock:
            self._check()
            if self._free:
                connection = self._free.pop()
                self._used.add(connection)
                return connection
        connection = _connect(self._where, self._secret, self._tls)
        lane.prepare(connection, _STALL_SECONDS)
        with self._lock:
            if not self.is_closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionError("the link was closed")

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._used.discard(connection)
        connection.close()

    def _check(self) -> None:
        if self.is_closed:
            raise ConnectionError("the link was closed")

    def _error(self, operation: Operation, reason: str) -> BackendError:
        verb = "load" if operation is Operation.READ else "store"
        where = f"tcp {self._where[0]}:{self._where[1]}"
        return BackendError(reason, operation=verb, context=where, is_temporary=True)


class TcpTransport:
    """Links to any number of stores."""

    name = "tcp"
    takes_device_memory = False

    def __init__(self, tls: SSLContext | None) -> None:
        self._tls = tls
        self._links: set[TcpLink] = set()

    def hello(self) -> bytes:
        """There is nothing to say."""
        return b""

    async def connect(self, peer: str, host: str, answer: bytes) -> TcpLink:
        if len(answer) != ANSWER.size:
            reason = f"{peer}: its answer for tcp has {len(answer)} bytes"
            raise BackendError(reason, operation="connect", context=peer)
        port, secret = ANSWER.unpack(answer)
        link = TcpLink(host, port, secret, self._tls)
        over = {known for known in self._links if known.is_closed}
        self._links = self._links - over | {link}
        if over:
            await asyncio.gather(*(known.aclose() for known in over))
        return link

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        """Sockets take any memory."""
        return lambda: None

    async def aclose(self) -> None:
        links, self._links = self._links, set()
        if links:
            await asyncio.gather(*(link.aclose() for link in links))


class _Kind:
    """The entry point."""

    async def open_transport(self, tls: SSLContext | None) -> Transport:
        return TcpTransport(tls)

    async def open_target(
        self, arena: Buffer, access: Access, host: str, port: int, tls: SSLContext | None
    ) -> Target:
        return await TcpTarget.listening(arena, access, host, port, tls)


TCP: Final = _Kind()


def _lanes() -> int:
    """As many threads as can copy at once. With more of them each load has its own, and what comes
    next has to be fetched from the event loop, which waits for a core like all of them; with fewer
    it waits in their queue."""
    return max(_LEAST_LANES, min(_MOST_LANES, usable_cores()))


def _read(connection: socket.socket, pieces: Sequence[Piece]) -> None:
    """All requests at once, then the answers in the same order."""
    asked = [
        lane.pack_request(Operation.READ, piece.generation, piece.offset, piece.buffer.nbytes)
        for piece in pieces
    ]
    lane.send(connection, b"".join(asked))
    for piece in pieces:
        assert piece.buffer.view is not None
        if receive(connection, piece.buffer.view) is not Status.OK:
            raise Refused("lease", "there is no lease of ours on it", "load", "tcp")


def _write(connection: socket.socket, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        nbytes = piece.buffer.nbytes
        asked = lane.pack_request(Operation.WRITE, piece.generation, piece.offset, nbytes)
        lane.send(connection, asked, more=nbytes > 0)
        assert piece.buffer.view is not None
        send(connection, piece.buffer.view)
    for piece in pieces:
        if lane.read_reply(connection, piece.buffer.nbytes) is not Status.OK:
            raise ConnectionError("the slot is not ours to fill any more")


receive = lane.receive_reply
send = lane.send
"""Where the caller's memory is touched, and nowhere else."""


def _connect(where: tuple[str, int], secret: bytes, tls: SSLContext | None) -> socket.socket:
    connection = socket.create_connection(where, timeout=_CONNECT_SECONDS)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=where[0])
        lane.send(connection, lane.greeting(secret))
    except BaseException:
        connection.close()
        raise
    return connection


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""The store's half of the tcp transport: a listening socket, and a thread for each lane.

A lane's thread asks :class:`cacheflow.pool.Access` before it touches the arena and holds the slot
as long as it does, so that a lease which ends meanwhile, or a client that hangs, never lets other
bytes into what is being sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.pool import watch_socket
from cacheflow.storage_backends.pool import lane
from cacheflow.storage_backends.pool.lane import Operation, Status
from cacheflow.tasks import all_or_nothing

if TYPE_CHECKING:
    from cacheflow.pool import Access
    from cacheflow.types import Buffer

__all__ = ["ANSWER", "TcpTarget"]

ANSWER: Final = struct.Struct(f">H{lane.SECRET_BYTES}s")
"""The port, and what a lane of this client has to say first."""

_log = logging.getLogger(__name__)
_GREETING_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 30.0
"""A client that is silent, or takes nothing of what it is sent, for so long is cut off."""
_LEAST_RATE: Final = 256 << 10
"""Bytes a second that a transfer has to make on top of that: it holds its slot as long as it lasts,
and one that trickles would do so for ever."""
_LOOK_SECONDS: Final = 5.0
"""Between two looks for those."""
_CLOSE_SECONDS: Final = 2.0
_MOST_LANES: Final = 2048
_MOST_OF_ONE: Final = 64
"""Lanes of one client; it opens about as many as it has cores, four at most."""
_MOST_STRANGERS: Final = 64
"""Connections that have not said whose they are. A client does so at once: where there are more,
the one that has taken longest is cut."""


class TcpTarget:
    """Over ``arena``; made by :meth:`listening`."""

    name = "tcp"
    shuts_out = True

    def __init__(
        self, listener: socket.socket, arena: Buffer, access: Access, tls: ssl.SSLContext | None
    ) -> None:
        assert arena.view is not None
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._view = arena.view
        self._access = access
        self._tls = tls
        self._lock = threading.Lock()
        """Guards the mappings: lanes come and go on threads of their own."""
        self._clients: dict[bytes, str] = {}
        self._lanes: dict[socket.socket, str] = {}
        self._strangers: dict[threading.Thread, int] = {}
        """Descriptors of connections that have not, in the order in which they came."""
        self._moving: dict[socket.socket, float] = {}
        """Lanes at work, and when that has to be over."""
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        listener.settimeout(_LOOK_SECONDS)
        threading.Thread(target=self._accept, name="cacheflow-pool-accept", daemon=True).start()

    @classmethod
    async def listening(
        cls, arena: Buffer, access: Access, host: str, port: int, tls: ssl.SSLContext | None
    ) -> Self:
        """Raises ConfigError if the address cannot be used."""
        try:
            listener = await all_or_nothing(
                asyncio.to_thread(_listen, host, port), lambda made: asyncio.to_thread(made.close)
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"tcp transport: cannot listen at {host}:{port}: {reason}") from error
        return cls(listener, arena, access, tls)

    async def admit(self, client: str, hello: bytes) -> bytes:
        secret = secrets.token_bytes(lane.SECRET_BYTES)
        with self._lock:
            self._clients[secret] = client
        return ANSWER.pack(self.port, secret)

    async def dismiss(self, client: str) -> None:
        """Its lanes are cut; what one is touching in this moment is held until it is not."""
        with self._lock:
            for secret in [s for s, name in self._clients.items() if name == client]:
                del self._clients[secret]
            lanes = [connection for connection, name in self._lanes.items() if name == client]
        for connection in lanes:
            _cut(connection)

    def busy(self, leases: int) -> None:
        """The kernel makes progress by itself."""

    async def aclose(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        _cut(self._listener)
        self._listener.close()
        with self._lock:
            lanes, threads = list(self._lanes), list(self._threads)
        for connection in lanes:
            _cut(connection)
        await asyncio.to_thread(_join, threads, _CLOSE_SECONDS)

    # -- on threads ----------------------------------------------------------------------------

    def _accept(self) -> None:
        look = time.monotonic()
        while not self._closing.is_set():
            if (now := time.monotonic()) >= look:
                look = now + _LOOK_SECONDS
                self._cut_slow(now)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closing.wait(0.1):  # out of descriptors, say: not in a tight circle
                    _log.warning("tcp transport: %s", error)
                continue
            if len(self._threads) >= _MOST_LANES:
                _log.warning("tcp transport: a lane is turned away: there are %d", _MOST_LANES)
                connection.close()
                continue
            self._welcome(connection)

    def _cut_slow(self, now: float) -> None:
        for connection, until in list(self._moving.items()):
            if now > until:
                _log.warning("tcp transport: a lane is cut: it takes too long")
                _cut(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """A thread for it, which may turn out to be a stranger's."""
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="cacheflow-pool-lane", daemon=True
        )
        with self._lock:
            self._strangers[thread] = connection.fileno()
            if len(self._strangers) > _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                _cut_descriptor(self._strangers.pop(oldest))  # its thread ends then
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: this one is lost, the next may not be
            _log.warning("tcp transport: a lane is turned away: %s", error)
            self._end(thread, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            self._greet(connection)
            while True:
                self._one(connection, *lane.read_request(connection))
        except (OSError, IntegrityError) as error:
            if isinstance(error, IntegrityError):
                _log.warning("tcp transport: a lane is cut: %s", error)
        finally:
            self._end(threading.current_thread(), connection)

    def _end(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._lanes.pop(connection, None)
            self._strangers.pop(thread, None)
        connection.close()
        self._threads.discard(thread)

    def _greet(self, connection: socket.socket) -> None:
        """Until the client of this lane has said whose it is."""
        connection.settimeout(_GREETING_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        secret = lane.read_greeting(connection, _GREETING_SECONDS)
        lane.prepare(connection, 0)
        watch_socket(connection, _GONE_SECONDS)
        with self._lock:
            client = self._clients.get(secret)
            if client is None or self._closing.is_set():
                raise IntegrityError("it does not say whose it is")
            if sum(name == client for name in self._lanes.values()) >= _MOST_OF_ONE:
                raise IntegrityError(f"its client has {_MOST_OF_ONE} lanes already")
            self._strangers.pop(threading.current_thread(), None)
            self._lanes[connection] = client

    def _one(
        self,
        connection: socket.socket,
        operation: Operation,
        generation: int,
        offset: int,
        nbytes: int,
    ) -> None:
        client, is_write = self._lanes[connection], operation is Operation.WRITE
        hold = self._access.enter(client, generation, offset, nbytes, writing=is_write)
        if hold is None:
            lane.send(connection, lane.pack_reply(Status.DENIED, 0))
            if is_write:
                raise IntegrityError("a write to what is not its slot")
            raise ConnectionError("a read of what is not leased")  # its client waits for the bytes
        self._moving[connection] = time.monotonic() + _GONE_SECONDS + nbytes / _LEAST_RATE
        try:
            view = self._view[offset : offset + nbytes]
            if is_write:
                lane.receive(connection, view)
            else:
                lane.send(connection, lane.pack_reply(Status.OK, nbytes), more=nbytes > 0)
                lane.send(connection, view)
        finally:
            del self._moving[connection]
            hold.release()
        if is_write:
            lane.send(connection, lane.pack_reply(Status.OK, nbytes))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def _cut(connection: socket.socket) -> None:
    """Whoever is blocked in a call on it comes back."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _cut_descriptor(number: int) -> None:
    """The same of a connection that another thread may be wrapping, and has not closed."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as again:
        _cut(again)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    for thread in threads:
        thread.join(seconds / len(threads))

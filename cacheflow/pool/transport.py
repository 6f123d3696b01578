"""What carries the bytes between a client's memory and a store's arena: two halves, two contracts.

The client's half is a :class:`Transport` with a :class:`Link` to each peer, the store's half a
:class:`Target`. What they tell each other travels in the HELLO frames and is nobody else's
business. Directory, leases and generations belong to the side channel: a transport moves bytes.
Implementations register a :class:`TransportKind` under the entry-point group
``cacheflow.transports``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from cacheflow.types import Buffer, Hold

__all__ = ["Access", "Link", "Piece", "Target", "Transport", "TransportKind"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One range of a peer's arena, and the local memory for it, of the same length."""

    offset: int
    """From the start of the peer's arena."""
    generation: int
    """Of the slot that the range lies in."""
    buffer: Buffer


class Link(Protocol):
    """To one peer, as it was when it answered one HELLO; a new HELLO makes a new link.

    A hold of each piece's buffer is taken before the first await and released only when neither
    that memory nor the peer's can be touched by the transfer any more, whatever became of the
    caller: the side channel waits for it before it gives a slot back. May be called many times at
    once; each call is one unit, which ends on its own.
    """

    async def read(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        """Copy the peer's bytes into the buffers, whole or not at all as far as anyone may rely on.

        Raises:
            BackendError: it failed, or did not end within ``deadline`` seconds.
        """
        ...

    async def write(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        """Copy the buffers into the peer's arena; see :meth:`read`."""
        ...

    def close(self) -> None:
        """No new transfers; what runs ends as soon as it can be made to. Idempotent."""
        ...


class Transport(Protocol):
    """The client's half: one for all peers of a backend."""

    name: str
    """For messages and metrics, e.g. ``tcp``."""
    takes_device_memory: bool
    """Whether links take buffers of the kind DEVICE, once they are registered."""

    def hello(self) -> bytes:
        """For the store's half, at most 64 KiB."""
        ...

    async def connect(self, peer: str, host: str, answer: bytes) -> Link:
        """A link to the store that answered :meth:`hello` with ``answer``; ``host`` is the address
        its side channel is reached at.

        Raises:
            BackendError: it cannot be reached this way.
        """
        ...

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        """Most buffers will lie in ``memory``, until the answer is called: see
        :meth:`cacheflow.abc.StorageBackend.register_memory`."""
        ...

    async def aclose(self) -> None:
        """Close all links and let go of everything that no transfer holds. Bounded, idempotent."""
        ...


class Access(Protocol):
    """Whether a client may touch a range now; from any thread."""

    def enter(
        self, client: str, generation: int, offset: int, nbytes: int, *, writing: bool
    ) -> Hold | None:
        """A hold on the slot, acquired, for as long as the range is touched: release it. None: the
        client has no lease on it (or, ``writing``, it is not his to fill)."""
        ...


class Target(Protocol):
    """The store's half: one for all clients. ``client`` names a connection, not a process."""

    name: str
    shuts_out: bool
    """Whether :meth:`dismiss` stops a client that goes on writing. Where clients write by
    themselves (RDMA, shared memory) nothing does: what one was to fill is kept until its connection
    is over."""

    async def admit(self, client: str, hello: bytes) -> bytes:
        """A client said ``hello``; the answer for it, at most 64 KiB.

        Raises:
            IntegrityError: this is no hello.
        """
        ...

    async def dismiss(self, client: str) -> None:
        """The client is gone. On return it can touch the arena no more, as far as this half can
        help it: slots that it was writing are used again."""
        ...

    def busy(self, leases: int) -> None:
        """So many leases and slots to be filled exist now. Where memory can only be read while its
        owner makes progress: make it while there are any, sleep while there are none."""
        ...

    async def aclose(self) -> None:
        """Bounded, idempotent."""
        ...


class TransportKind(Protocol):
    """What an entry point of the group ``cacheflow.transports`` gives."""

    async def open_transport(self, tls: SSLContext | None) -> Transport:
        """The client's half; ``tls``: what the side channel uses.

        Raises:
            ConfigError: it cannot work on this machine; says what is missing.
        """
        ...

    async def open_target(
        self, arena: Buffer, access: Access, host: str, port: int, tls: SSLContext | None
    ) -> Target:
        """The store's half, over ``arena``. ``host``, ``port``: where it may listen, if it does;
        ``tls``: what the side channel uses.

        Raises:
            ConfigError: see :meth:`open_transport`.
        """
        ...

"""The store's half: the arena, registered once, and a thread that makes progress for its readers.

On transports without remote memory access (plain TCP) bytes move only while both ends look; so the
thread looks often when leases are given, and as long as it finds data to move; where a lease goes
unused it looks less and less often. It looks now and then without any, too: a transfer may outlast
its lease, or the connection that it was leased on, and its client holds memory until it has ended.
NIXL checks nothing: whoever has our metadata can reach all of the arena. Which slots a client may
touch is a matter of trust, and what it wrote is checked when it commits.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from cacheflow.storage_backends.nixl.agent import UcxAgent
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.memory import register
from cacheflow.storage_backends.nixl.reactor import Reactor
from cacheflow.storage_backends.nixl.transport import agent_name

if TYPE_CHECKING:
    from cacheflow.types import Buffer

__all__ = ["NixlTarget"]

_CLOSE_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 1.0
"""What a client that is gone has sent before may still arrive for so long."""
_LEASED: Final = 0.008
"""Most seconds between two looks with leases: how late the first read after a pause may begin."""
_IDLE: Final = 0.05
"""And without: a thousandth of a core."""
_NEWS_SECONDS: Final = 0.01
"""The thread is not told more often that there are other leases than before."""


class NixlTarget:
    """Use :meth:`open`."""

    name: Final = "nixl"
    shuts_out: Final = False

    def __init__(self, reactor: Reactor, hello: Hello) -> None:
        self._reactor = reactor
        self._answer = hello.encode()
        self._leases = 0
        self._lingering = 0
        self._longest = 0.0
        self._told = 0.0
        self._is_closed = False
        self._serve()

    @classmethod
    async def open(cls, arena: Buffer) -> Self:
        """Register ``arena``, which outlives the target.

        Raises:
            ConfigError: NIXL is not installed, or does not work here.
        """
        name = agent_name()
        reactor = Reactor(partial(UcxAgent, name))
        await reactor.start()
        try:
            await register(reactor, arena)
            metadata = await reactor.call(lambda agent: agent.metadata())
        except BaseException:
            await reactor.aclose(_CLOSE_SECONDS)
            raise
        return cls(reactor, Hello(name, arena.address, arena.nbytes, metadata))

    async def admit(self, client: str, hello: bytes) -> bytes:
        return self._answer

    async def dismiss(self, client: str) -> None:
        """Take what is on the wire still: NIXL has no way to shut a client out."""
        self._lingering += 1
        self._serve()
        try:
            await asyncio.sleep(_LINGER_SECONDS)
        finally:
            self._lingering -= 1
            self._serve()

    def busy(self, leases: int) -> None:
        self._leases = leases
        self._serve()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._reactor.aclose(_CLOSE_SECONDS)

    def _serve(self) -> None:
        longest = _LEASED if self._leases + self._lingering > 0 else _IDLE
        now = time.monotonic()
        if longest != self._longest or now - self._told > _NEWS_SECONDS:
            self._longest, self._told = longest, now
            self._reactor.serve(longest)

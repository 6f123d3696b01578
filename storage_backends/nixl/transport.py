"""The client's half: one agent for all stores, a link to each, and our memory registered with it.

Knows nothing of keys and leases; which stores there are, and when to greet them again, is its
caller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import BackendError
from cacheflow.storage_backends.nixl.agent import UcxAgent
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.link import NixlLink
from cacheflow.storage_backends.nixl.memory import OurMemory
from cacheflow.storage_backends.nixl.reactor import Reactor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import Buffer

__all__ = ["NixlTransport", "agent_name"]

_log = logging.getLogger(__name__)
_SLAB_BYTES: Final = 64 << 20
"""For buffers outside of what was registered; touched, and so taken, only as it is used."""
_CLOSE_SECONDS: Final = 1.0
_PART_SECONDS: Final = 2.0
"""How long a new link waits for what is still in flight on a broken one to the same store."""


@dataclass(slots=True)
class _Known:
    """A store that the agent knows."""

    links: int = 0
    parting: asyncio.Future[None] | None = None


class NixlTransport:
    """Use :meth:`open`."""

    name: Final = "nixl"

    def __init__(self, reactor: Reactor, memory: OurMemory) -> None:
        self._reactor = reactor
        self._memory = memory
        self._known: dict[str, _Known] = {}
        self._is_closed = False

    @classmethod
    async def open(cls, *, depth: int = 16, slab_bytes: int = _SLAB_BYTES) -> Self:
        """``depth``: most transfers with one store at once; the others wait for them.

        Raises:
            ConfigError: NIXL is not installed, or does not work here.
        """
        reactor = Reactor(partial(UcxAgent, agent_name()), depth=depth)
        await reactor.start()
        try:
            memory = await OurMemory.open(reactor, asyncio.get_running_loop(), slab_bytes)
        except BaseException:
            await reactor.aclose(_CLOSE_SECONDS)
            raise
        return cls(reactor, memory)

    @property
    def in_flight(self) -> int:
        """Transfers that may still touch memory here, waited for or not."""
        return self._reactor.in_flight

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the slab that nobody waits for any more but that may still be touched."""
        return self._memory.quarantined_bytes

    def hello(self) -> bytes:
        """Nothing: a store needs to know nothing of who reads and writes its memory."""
        return b""

    async def connect(self, peer: str, host: str, answer: bytes) -> NixlLink:
        hello = Hello.decode(answer)
        await self._get_to_know(peer, hello)
        return NixlLink(
            hello.agent, hello, self._reactor, self._memory, partial(self._closed, hello.agent)
        )

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self._memory.register_memory(memory)

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not await self._reactor.aclose(_CLOSE_SECONDS):
                _log.error("NIXL: closed with %d transfers still under way", self.in_flight)
            await self._memory.aclose()

    async def _get_to_know(self, peer: str, hello: Hello) -> None:
        known = self._known.get(hello.agent)
        if known is not None and known.parting is not None:
            await self._parted(peer, known.parting)
            known = None
        if known is None:
            await self._add(peer, hello)
            known = self._known.setdefault(hello.agent, _Known())
        known.links += 1

    async def _add(self, peer: str, hello: Hello) -> None:
        try:
            name = await self._reactor.call(lambda agent: agent.add(hello.metadata))
        except BackendError as error:
            raise _connect_error(peer, f"cannot be reached through NIXL ({error})") from None
        except asyncio.CancelledError:  # it may be added all the same, and nobody would part
            self._reactor.part(hello.agent)
            raise
        if name != hello.agent:
            self._reactor.part(name)
            raise _connect_error(peer, f"calls itself {hello.agent!r}, and is {name!r}")

    async def _parted(self, peer: str, parting: asyncio.Future[None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PART_SECONDS):
                await asyncio.shield(parting)
                return
        raise _connect_error(peer, "transfers of an older connection have not ended yet")

    def _closed(self, agent: str) -> None:
        """A link to ``agent`` was closed: the last one ends the acquaintance."""
        known = self._known[agent]
        known.links -= 1
        if known.links == 0:
            known.parting = self._reactor.part(agent)
            known.parting.add_done_callback(lambda done: self._forget(agent, known))

    def _forget(self, agent: str, known: _Known) -> None:
        if self._known.get(agent) is known:
            del self._known[agent]


def agent_name() -> str:
    """Another one for each start of each process: NIXL takes no second one of the same name."""
    return f"cacheflow-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _connect_error(peer: str, reason: str) -> BackendError:
    return BackendError(reason, operation="connect", context=peer, is_temporary=True)

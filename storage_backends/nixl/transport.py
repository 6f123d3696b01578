"""The client's half: links to all stores, made by one agent, or by another where that one hangs.

What hangs cannot be ended: not by us, nor by NIXL. So an agent with which it does keeps its memory
and goes on looking, and what cannot be done with it is done with the next one. Knows nothing of
keys and leases; which stores there are, and when to greet them again, is its caller's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from cacheflow.errors import ClosedError, ConfigError
from cacheflow.storage_backends.nixl.agent import UcxAgent
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.worker import Worker, connect_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cacheflow.storage_backends.nixl.link import NixlLink
    from cacheflow.types import Buffer

__all__ = ["NixlTransport", "agent_name"]

_Start: TypeAlias = "Callable[[], Awaitable[Worker]]"
_log = logging.getLogger(__name__)
_SLAB_BYTES: Final = 64 << 20
"""For buffers outside of what was registered; touched, and so taken, only as it is used."""
_CLOSE_SECONDS: Final = 1.0
_MOST_AGENTS: Final = 4
"""Of one client at once: each has a thread, a slab, and all staging memory registered with it."""


class NixlTransport:
    """Use :meth:`open`. ``start`` makes one agent more, at work."""

    name = "nixl"
    takes_device_memory = True

    def __init__(self, first: Worker, start: _Start) -> None:
        self._workers = [first]
        self._start = start
        self._starting: asyncio.Task[None] | None = None
        self._regions: dict[object, Buffer] = {}
        """To be registered with every agent."""
        self._closing: set[asyncio.Task[bool]] = set()
        self._is_closed = False

    @classmethod
    async def open(cls, *, depth: int = 16, slab_bytes: int = _SLAB_BYTES) -> Self:
        """``depth``: most transfers with one store at once; the others wait for them.

        Raises:
            ConfigError: NIXL is not installed, or does not work here.
        """

        async def start() -> Worker:
            return await Worker.start(partial(UcxAgent, agent_name()), depth, slab_bytes)

        return cls(await start(), start)

    @property
    def agents(self) -> int:
        """One, and those that were made because of transfers that hang."""
        return len(self._workers)

    @property
    def in_flight(self) -> int:
        """Transfers that may still touch memory here, waited for or not."""
        return sum(worker.reactor.in_flight for worker in self._workers)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slabs that nobody waits for any more but that may still be touched."""
        return sum(worker.memory.quarantined_bytes for worker in self._workers)

    def hello(self) -> bytes:
        """Nothing: a store needs to know nothing of who reads and writes its memory."""
        return b""

    async def connect(self, peer: str, host: str, answer: bytes) -> NixlLink:
        hello = Hello.decode(answer)
        if self._is_closed:
            raise ClosedError("the NIXL transport was closed")
        worker = await self._choose(peer, hello.agent)
        link = await worker.connect(peer, hello)
        self._retire(worker)
        return link

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        token = object()
        self._regions[token] = memory
        for worker in self._workers:
            worker.register(token, memory)

        def end() -> None:
            if self._regions.pop(token, None) is not None:
                for worker in self._workers:
                    worker.deregister(token)

        return end

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._starting is not None:
                await asyncio.wait([self._starting], timeout=_CLOSE_SECONDS)
            ended = await asyncio.gather(*(worker.aclose() for worker in self._workers))
            if not all(ended):
                _log.error("NIXL: closed with %d transfers still under way", self.in_flight)
            if self._closing:
                await asyncio.wait(self._closing)

    async def _choose(self, peer: str, agent: str) -> Worker:
        """The first one that can make a link to the store called ``agent``."""
        tried: set[Worker] = set()
        hindrance = ""
        while True:
            untried = [worker for worker in self._workers if worker not in tried]
            if not untried:
                await self._another(peer, hindrance)
                continue
            hindrance = await untried[0].hindrance(agent)
            if not hindrance:
                return untried[0]
            tried.add(untried[0])

    async def _another(self, peer: str, hindrance: str) -> None:
        """Have one more. It is made whatever becomes of who waits for it: others will use it."""
        if self._starting is None:
            number = len(self._workers) + 1
            if number > _MOST_AGENTS:
                reason = (
                    f"{hindrance}; so it is with each of the {_MOST_AGENTS} NIXL agents that this "
                    "process may have: transport tcp goes on, or a new start of this process"
                )
                raise connect_error(peer, reason)
            _log.warning(
                "NIXL: %s: %s; what is held stays held, and agent %d of at most %d is made",
                peer,
                hindrance,
                number,
                _MOST_AGENTS,
            )
            self._starting = asyncio.create_task(self._start_another())
            self._starting.add_done_callback(_heard)
        try:
            await asyncio.shield(self._starting)
        except ConfigError as error:
            reason = f"{hindrance}, and no other NIXL agent can be made ({error})"
            raise connect_error(peer, reason) from error

    async def _start_another(self) -> None:
        try:
            worker = await self._start()
        finally:
            self._starting = None
        if self._is_closed:  # it took too long
            await worker.aclose()
            return
        for token, memory in self._regions.items():
            worker.register(token, memory)
        self._workers.append(worker)

    def _retire(self, kept: Worker) -> None:
        """One that has nothing to do any more is not needed beside ``kept``."""
        for worker in list(self._workers):
            if worker is not kept and worker.is_idle:
                self._workers.remove(worker)
                task = asyncio.create_task(worker.aclose())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waits for it hears of it


def agent_name() -> str:
    """Another one for each start of each process: NIXL takes no second one of the same name."""
    return f"cacheflow-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

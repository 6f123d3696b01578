"""Our memory as NIXL sees it: regions that are registered once, and a slab for all other buffers.

A buffer inside a region is read from and written to by the hardware itself. What lies elsewhere
goes through the slab, with one copy on the reactor's thread (without the GIL).
"""

from __future__ import annotations

import asyncio
import logging
from ctypes import memmove
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, ClosedError, ConfigError
from cacheflow.memory import StagingPool
from cacheflow.storage_backends.nixl.reactor import Reactor
from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.memory import Lease
    from cacheflow.storage_backends.nixl.agent import Agent
    from cacheflow.types import Buffer

__all__ = ["OurMemory", "Stopover", "register", "start_agent"]

_log = logging.getLogger(__name__)
_PARTS: Final = 8
"""The slab takes so many of the largest pieces at once."""
_SHARE: Final = 4
"""One peer's transfers, those that hang included, have at most this fraction of the slab."""
_CLOSE_SECONDS: Final = 1.0
_ROOM_SECONDS: Final = 1.0
"""How long there is to wait for room in a slab that is mostly held by what hangs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    start: int
    stop: int
    kind: MemoryKind
    registered: object

    def has(self, buffer: Buffer) -> bool:
        """Whether all of ``buffer`` is in it, and of its kind."""
        inside = self.start <= buffer.address and buffer.address + buffer.nbytes <= self.stop
        is_device = self.kind is MemoryKind.DEVICE
        return inside and is_device is (buffer.kind is MemoryKind.DEVICE)


class OurMemory:
    """Use :meth:`open`. Buffers of up to ``part_bytes`` fit into the slab at once."""

    def __init__(
        self, reactor: Reactor, loop: asyncio.AbstractEventLoop, slab: StagingPool
    ) -> None:
        self._reactor = reactor
        self._loop = loop
        self._slab = slab
        self.part_bytes: Final = slab.capacity // _PARTS
        self._regions: list[_Region] = []

    @classmethod
    async def open(
        cls, reactor: Reactor, loop: asyncio.AbstractEventLoop, slab_bytes: int
    ) -> OurMemory:
        """Allocate the slab and register it.

        Raises:
            ConfigError: it cannot be registered.
        """
        slab = StagingPool(slab_bytes)
        memory = cls(reactor, loop, slab)
        try:
            memory._regions.append(await register(reactor, slab.arena))
        except BaseException:
            await slab.aclose()
            raise
        return memory

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of the slab that nobody waits for any more but that may still be touched."""
        return self._slab.quarantined_bytes()

    @property
    def is_worn(self) -> bool:
        """Whether what nobody waits for any more holds most of the slab."""
        return 2 * self.quarantined_bytes > self._slab.capacity

    def welcome(self, peer: str) -> None:
        """Transfers with ``peer`` get their share of the slab, and leave the others theirs."""
        self._slab.set_cap(peer, self._slab.capacity // _SHARE)

    def dismiss(self, peer: str) -> None:
        """There are no transfers with ``peer`` any more but what hangs."""
        self._slab.set_cap(peer, None)

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        """Use ``memory`` as it lies, as soon as it is registered and until the answer is called."""
        registration = _Registration(self._regions, self._reactor)
        self._reactor.order(partial(self._register, memory, registration))
        return registration.end

    def is_registered(self, buffer: Buffer) -> bool:
        """Whether ``buffer`` can be transferred as it lies."""
        return any(region.has(buffer) for region in self._regions)

    async def stopover(self, peer: str, nbytes: int) -> Stopover:
        """Room in the slab for a transfer with ``peer``; waits until there is some.

        Raises:
            BackendError: there is none, and will not soon be: transfers hang in it.
        """
        if not self.is_worn:
            return Stopover(await self._slab.lease(nbytes, peer))
        try:
            async with asyncio.timeout(_ROOM_SECONDS):
                return Stopover(await self._slab.lease(nbytes, peer))
        except TimeoutError:
            reason = f"{self.quarantined_bytes} bytes of the slab are held by transfers that hang"
            raise BackendError(reason, operation="transfer", is_temporary=True) from None

    async def aclose(self) -> None:
        """Give the slab back, or leave it to what may still touch it."""
        await self._slab.aclose()

    def _register(self, memory: Buffer, registration: _Registration, agent: Agent) -> None:
        """On the reactor's thread. Without it buffers of the host are copied, which is slower."""
        try:
            region = _region(memory, agent)
        except ConfigError as error:
            is_device = memory.kind is MemoryKind.DEVICE
            what = "nothing can be loaded there" if is_device else "what is loaded is copied"
            _log.warning("%s: %s", error, what)
            return
        self._loop.call_soon_threadsafe(registration.begin, region)


class _Registration:
    """A region that can be used until its owner wants it back. On the loop."""

    def __init__(self, regions: list[_Region], reactor: Reactor) -> None:
        self._regions = regions
        self._reactor = reactor
        self._region: _Region | None = None
        self._is_over = False

    def begin(self, region: _Region) -> None:
        """It is registered now."""
        self._region = region
        self._regions.append(region)
        if self._is_over:
            self._deregister(region)

    def end(self) -> None:
        """No flight that begins from now on uses it. Idempotent."""
        if not self._is_over:
            self._is_over = True
            if self._region is not None:
                self._deregister(self._region)

    def _deregister(self, region: _Region) -> None:
        self._regions.remove(region)
        # Not under a transfer: hardware may be at it.
        memory = (region.start, region.stop - region.start)
        self._reactor.order(lambda agent: agent.deregister(region.registered), after=memory)


async def start_agent(
    make_agent: Callable[[], Agent], depth: int, slab_bytes: int
) -> tuple[Reactor, OurMemory]:
    """The thread of a new agent, at work, and our memory with its slab registered.

    Raises:
        ConfigError: there can be no agent here, or it takes no memory.
    """
    reactor = Reactor(make_agent, depth=depth)
    await reactor.start()
    try:
        return reactor, await OurMemory.open(reactor, asyncio.get_running_loop(), slab_bytes)
    except BaseException:
        await reactor.aclose(_CLOSE_SECONDS)
        raise


async def register(reactor: Reactor, memory: Buffer) -> _Region:
    """Make ``memory`` known to NIXL, until the agent is gone.

    Raises:
        ConfigError: it cannot be registered.
    """
    return await reactor.call(partial(_region, memory))


def _region(memory: Buffer, agent: Agent) -> _Region:
    try:
        registered = agent.register(memory.address, memory.nbytes, memory.kind)
    except (ClosedError, ConfigError):
        raise
    except Exception as error:  # NIXL's errors have no base class of their own
        raise ConfigError(
            f"NIXL cannot register {memory.nbytes} bytes of {memory.kind} memory ({error}): "
            "is the limit of locked memory (ulimit -l) high enough?"
        ) from error
    return _Region(memory.address, memory.address + memory.nbytes, memory.kind, registered)


class Stopover:
    """A place in the slab for one flight, beside the buffer that it is for."""

    def __init__(self, lease: Lease) -> None:
        self.buffer: Final = lease.buffer
        self.release: Final = lease.release
        """Give it back: at once, or when the flight has ended."""

    def copy_to(self, address: int) -> Callable[[], None]:
        """What hands on what has arrived."""
        return partial(_copy, address, self.buffer.address, self.buffer.nbytes)

    def copy_from(self, address: int) -> Callable[[], None]:
        """What fetches what is to be sent."""
        return partial(_copy, self.buffer.address, address, self.buffer.nbytes)


def _copy(target: int, source: int, nbytes: int) -> None:
    memmove(target, source, nbytes)

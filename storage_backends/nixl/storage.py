"""Files and objects over NIXL: opened by name, then read and written as a link.

The same deadlines, holds, quarantine and slab as with a store's memory; another driver below.
Knows nothing of keys: whoever has names (a folder, a bucket's index) uses this to move bytes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import BackendError
from cacheflow.memory import buffer_from
from cacheflow.pool import Piece
from cacheflow.storage_backends.nixl.drivers import DRIVERS, Driver, Named, StorageAgent
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.link import NixlLink
from cacheflow.storage_backends.nixl.memory import start_agent
from cacheflow.storage_backends.nixl.transport import agent_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.storage_backends.nixl.memory import OurMemory
    from cacheflow.storage_backends.nixl.reactor import Reactor
    from cacheflow.types import Buffer

__all__ = ["NixlStorage"]

_log = logging.getLogger(__name__)
_SLAB_BYTES: Final = 64 << 20
"""For buffers outside of what was registered; touched, and so taken, only as it is used."""
_CLOSE_SECONDS: Final = 1.0
_OPEN_SECONDS: Final = 10.0


class NixlStorage:
    """Use :meth:`start`."""

    def __init__(self, driver: Driver, reactor: Reactor, memory: OurMemory) -> None:
        self._driver = driver
        self._reactor = reactor
        self._memory = memory
        self._peers: set[str] = set()
        self._is_closed = False

    @classmethod
    async def start(
        cls, driver: Driver | str, *, depth: int = 16, slab_bytes: int = _SLAB_BYTES
    ) -> Self:
        """``driver``: one of ``DRIVERS``, or one with parameters of its own; ``depth``: most
        transfers of one file or object at once.

        Raises:
            ConfigError: NIXL is not installed, or has no such driver that works here.
        """
        driver = DRIVERS[driver] if isinstance(driver, str) else driver
        make_agent = partial(StorageAgent, agent_name(), driver)
        return cls(driver, *await start_agent(make_agent, depth, slab_bytes))

    @property
    def in_flight(self) -> int:
        """Transfers that may still touch memory here, waited for or not."""
        return self._reactor.in_flight

    async def open(self, name: str, nbytes: int, *, writing: bool = False) -> NixlLink:
        """The first ``nbytes`` of a file or an object; close the link when it is not needed any
        more. ``writing``: it is made, or made so long. What is written is not synced to the disk.

        Raises:
            BackendError: it cannot be opened, or is shorter.
        """
        metadata = Named(name, nbytes, writing).encode()
        peer = await self._reactor.call(lambda agent: agent.add(metadata))
        self._peers.add(peer)
        hello = Hello(peer, 0, nbytes, metadata)
        link = NixlLink(peer, hello, self._reactor, self._memory, partial(self._part, peer))
        if not self._driver.has_files and not writing and nbytes:
            await _check_last_byte(link, name, nbytes)
        return link

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        """Most buffers will lie in ``memory``, until the answer is called."""
        return self._memory.register_memory(memory)

    async def aclose(self) -> None:
        """Close all links. Bounded, idempotent; what still moves keeps its file open until it has
        ended."""
        if not self._is_closed:
            self._is_closed = True
            for peer in list(self._peers):
                self._part(peer)
            if not await self._reactor.aclose(_CLOSE_SECONDS):
                _log.error("NIXL: closed with %d transfers still under way", self.in_flight)
            await self._memory.aclose()

    def _part(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._reactor.part(peer)


async def _check_last_byte(link: NixlLink, name: str, nbytes: int) -> None:
    """NIXL does not say how long an object is, and calls a GET of more than there is done, with
    whatever lay in the tail. But nobody has a byte behind the end."""
    try:
        last = Piece(nbytes - 1, 0, buffer_from(bytearray(1)))
        await link.read([last], deadline=_OPEN_SECONDS)
    except BackendError as error:
        link.close()
        reason = f"it does not have {nbytes} bytes ({error})"
        raise BackendError(reason, operation="open", context=name) from error
    except BaseException:
        link.close()
        raise

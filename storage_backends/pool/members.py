"""The stores of a pool: found, kept connected, and which of them a chunk belongs to.

Stores come and go while requests run; nobody waits for one that is not there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, ConfigError
from cacheflow.storage_backends.pool.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheflow.storage_backends.pool.discovery import Discovery
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.storage_backends.pool.settings import Address, PoolOptions

__all__ = ["Members"]

_log = logging.getLogger(__name__)
_FATAL: Final = frozenset({"token", "transport"})
"""Refusals that no waiting changes."""


class Members:
    """``make`` makes a peer, not started, of a name and an address."""

    def __init__(
        self, discovery: Discovery, options: PoolOptions, make: Callable[[str, Address], Peer]
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.placement = Placement((), options.replicas)
        self._discovery = discovery
        self._options = options
        self._make = make
        self._following: asyncio.Task[None] | None = None
        self._leaving: list[Peer] = []
        """Not on the list any more, and not closed yet."""

    async def open(self) -> None:
        """Find the stores and try each once; those that cannot be reached are tried on.

        Raises:
            ConfigError: every store that answers refuses us, for a reason that will not pass.
        """
        try:
            await self._apply(await self._discovery.find())
        except BackendError as error:
            _log.warning("pool: no stores are known yet: %s", error)
        if self._discovery.changes:
            self._following = asyncio.create_task(self._follow())
        peers = list(self.peers.values())
        if peers:
            waits = [asyncio.create_task(peer.tried.wait()) for peer in peers]
            try:
                await asyncio.wait(waits, timeout=2 * self._options.connect_seconds)
            finally:
                for wait in waits:
                    wait.cancel()
        refused = [peer.refused for peer in peers if peer.refused is not None]
        if refused and not any(peer.is_up for peer in peers):
            for refusal in refused:
                if refusal.code in _FATAL:
                    raise ConfigError(f"storage backend 'pool': {refusal}")

    def of(self, digest: bytes) -> list[Peer]:
        """The stores of a chunk that are up, the first one first."""
        peers = (self.peers[name] for name in self.placement.of(digest))
        return [peer for peer in peers if peer.is_up]

    @property
    def up(self) -> list[Peer]:
        """All that may be asked."""
        return [peer for peer in self.peers.values() if peer.is_up]

    @property
    def missing(self) -> list[str]:
        """Names of those that may not."""
        return [name for name, peer in self.peers.items() if not peer.is_up]

    async def aclose(self) -> None:
        """Idempotent."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])
        await self._discovery.aclose()
        peers = [*self.peers.values(), *self._leaving]
        self.peers, self._leaving = {}, []
        self.placement = Placement((), self._options.replicas)
        if peers:
            await asyncio.gather(*(peer.aclose() for peer in peers))

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._options.discovery_seconds)
            try:
                await self._apply(await self._discovery.find())
            except Exception as error:  # whatever it is: without this no store would ever join
                _log.warning("pool: the list of stores cannot be had: %s", error)

    async def _apply(self, found: Mapping[str, Address]) -> None:
        """Nothing at all is no news but a registry in trouble: the stores known are kept."""
        if not found and self.peers:
            _log.warning("pool: no store is announced any more; those known are kept")
            return
        self._leaving += [self.peers.pop(name) for name in set(self.peers) - set(found)]
        for name, address in found.items():
            if name not in self.peers:
                self.peers[name] = self._make(name, address)
                self.peers[name].start()
        self.placement = Placement(self.peers, self._options.replicas)
        if self._leaving:
            await asyncio.gather(*(peer.aclose() for peer in self._leaving))
            self._leaving = []

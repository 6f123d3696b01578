"""Where the stores are: named in the options, found by DNS, or announced in etcd.

Finds; whoever asks decides how often, and keeps what was found before when asking fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

from cacheflow.errors import BackendError
from cacheflow.pool import Etcd
from cacheflow.storage_backends.pool.settings import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.storage_backends.pool.settings import Address, PoolOptions

__all__ = ["Discovery", "discovery"]

_log = logging.getLogger(__name__)
_RESOLVE_SECONDS: Final = 5.0


class Discovery(Protocol):
    """Stores by the name that keys are placed by: the same on every client."""

    changes: bool
    """Whether asking again can give another answer."""

    async def find(self) -> Mapping[str, Address]:
        """Raises BackendError if it cannot be told now."""
        ...

    async def aclose(self) -> None: ...


async def discovery(options: PoolOptions) -> Discovery:
    """What ``options`` ask for.

    Raises:
        ConfigError: a package is missing.
    """
    if options.etcd is not None:
        return _InEtcd(await Etcd.open(options.etcd), options.etcd_prefix)
    if options.dns is not None:
        return _InDns(options.dns)
    return _Named(options.peers)


class _Named:
    changes = False

    def __init__(self, peers: tuple[str, ...]) -> None:
        found = [parse_address(peer) for peer in peers]
        self._found = {f"{host}:{port}": (host, port) for host, port in found}

    async def find(self) -> Mapping[str, Address]:
        return self._found

    async def aclose(self) -> None:
        """Nothing is open."""


class _InDns:
    changes = True

    def __init__(self, dns: str) -> None:
        self._name, self._port = parse_address(dns)
        self._asking: asyncio.Future[Any] | None = None
        """One question at a time: a resolver that hangs takes a thread for each."""

    async def find(self) -> Mapping[str, Address]:
        loop = asyncio.get_running_loop()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(
                loop.getaddrinfo(
                    self._name, self._port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
                )
            )
        try:
            async with asyncio.timeout(_RESOLVE_SECONDS):
                answers = await asyncio.shield(self._asking)
        except (OSError, TimeoutError) as error:
            reason = f"{self._name} cannot be resolved: {error}"
            raise BackendError(reason, operation="discover", is_temporary=True) from error
        hosts = {str(answer[4][0]) for answer in answers}
        return {f"{host}:{self._port}": (host, self._port) for host in hosts}

    async def aclose(self) -> None:
        """What is still being asked is of no interest."""
        if self._asking is not None:
            self._asking.cancel()


class _InEtcd:
    changes = True

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._prefix = prefix

    async def find(self) -> Mapping[str, Address]:
        found: dict[str, Address] = {}
        for key, value in (await self._etcd.list(self._prefix)).items():
            try:
                address = json.loads(value)["address"]
                found[str(address)] = parse_address(str(address))
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("etcd: %s does not announce a store: %s", key, error)
        return found

    async def aclose(self) -> None:
        await self._etcd.aclose()

"""The pool's transport over NIXL: RDMA where there is any, shared memory or TCP elsewhere.

Registered as ``nixl`` under ``cacheflow.transports``; docs/nixl.md is for operators. NIXL is
imported when something is opened, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.storage_backends.nixl.drivers import DRIVERS, Driver
from cacheflow.storage_backends.nixl.storage import NixlStorage
from cacheflow.storage_backends.nixl.target import NixlTarget
from cacheflow.storage_backends.nixl.transport import NixlTransport

if TYPE_CHECKING:
    from ssl import SSLContext

    from cacheflow.pool import Access
    from cacheflow.types import Buffer

__all__ = ["DRIVERS", "NIXL", "Driver", "NixlStorage", "NixlTarget", "NixlTransport"]


class _Nixl:
    """A :class:`cacheflow.pool.TransportKind`."""

    async def open_transport(self, tls: SSLContext | None) -> NixlTransport:
        """``tls`` is of no use: what protects RDMA is the network that it runs on."""
        return await NixlTransport.open()

    async def open_target(
        self, arena: Buffer, access: Access, host: str, port: int, tls: SSLContext | None
    ) -> NixlTarget:
        """Nor are the others: UCX listens where it likes (``UCX_NET_DEVICES``), and hardware asks
        nobody for access."""
        return await NixlTarget.open(arena)


NIXL: Final = _Nixl()

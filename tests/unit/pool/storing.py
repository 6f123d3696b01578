"""A store of the pool in this process, and clients of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheflow.kv import decode_header, encode_header
from cacheflow.memory import buffer_from
from cacheflow.pool import StoreSettings, running
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.testing.objects import load_one, make_object
from cacheflow.types import TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.pool import StoreServer
    from cacheflow.testing.objects import StoredObject

__all__ = ["SIZE", "client", "of_tenant", "serving", "there"]

SIZE = make_object(1).info.nbytes


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[StoreServer]:
    """A store with room for eight objects, unless told otherwise."""
    fixed = {"port": 0, "data_port": 0, "transports": ("tcp",), "arena": 8 * SIZE}
    async with running(StoreSettings(**fixed | settings)) as server:
        yield server


@asynccontextmanager
async def client(server: StoreServer, **options: Any) -> AsyncIterator[PoolBackend]:
    """A client that knows this store only."""
    where = {"peers": [f"localhost:{server.port}"], "transports": ["tcp"]}
    backend = await PoolBackend.open(where | options)
    try:
        yield backend
    finally:
        await backend.aclose()


async def there(backend: PoolBackend, objects: list[StoredObject]) -> list[int]:
    """Places of those that can be read; what is read is what was stored."""
    found = []
    for at, each in enumerate(objects):
        result, data = await load_one(backend, each.key, 0, len(each.data))
        if result.status is TransferStatus.OK:
            assert data == each.data
            found.append(at)
        else:
            assert result.status is TransferStatus.MISSING
    return found


def of_tenant(stored: StoredObject, tenant: bytes) -> Write:
    """The same object as another tenant's."""
    info = decode_header(encode_header(replace(stored.info, tenant_id=tenant)))
    return Write(info, (buffer_from(encode_header(info)), buffer_from(stored.payload)))

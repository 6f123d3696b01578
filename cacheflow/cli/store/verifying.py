"""Reads one stored object whole, a few layers at a time, and compares its checksums, or its tags.

Uses the storage contract and the codec; memory stays bounded whatever the object's size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv import format_name, verify
from cacheflow.memory import StagingPool
from cacheflow.types import Read, Span, TransferStatus

if TYPE_CHECKING:
    from cacheflow.abc import StorageBackend
    from cacheflow.kv import ChunkAuth
    from cacheflow.types import Buffer, ChunkInfo

__all__ = ["Finding", "verify_object"]

_STEP_BYTES: Final = 8 << 20
"""Bytes read and verified at a time, but at least one layer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What reading one object showed; ``error`` is empty when all is well."""

    name: str
    nbytes: int
    error: str = ""


async def verify_object(
    backend: StorageBackend, info: ChunkInfo, auth: ChunkAuth | None = None
) -> Finding:
    """Read and verify all layers of ``info``; stops at the first bad run. ``auth``: who has to have
    written it."""
    name = format_name(info.key)
    try:
        if auth is not None:
            auth.check_header(info)
    except IntegrityError as refused:
        return Finding(name, info.nbytes, str(refused))
    stride = max(info.block_sizes(info.key.layers))
    step = max(1, _STEP_BYTES // stride)
    pool = StagingPool(min(step, len(info.key.layers)) * stride)
    try:
        for first in range(info.key.layers.start, info.key.layers.stop, step):
            layers = Span(first, min(first + step, info.key.layers.stop))
            with await pool.lease(layers_bytes := info.layer_range(layers)[1]) as lease:
                buffer = lease.part(0, layers_bytes)
                if error := await _verify_layers(backend, info, layers, buffer, auth):
                    return Finding(name, info.nbytes, error)
    finally:
        await pool.aclose()
    return Finding(name, info.nbytes)


async def _verify_layers(
    backend: StorageBackend,
    info: ChunkInfo,
    layers: Span,
    buffer: Buffer,
    auth: ChunkAuth | None,
) -> str:
    read = Read(info.key, info.layer_range(layers)[0], buffer)
    for result in [result async for result in backend.load([read])]:
        if result.status is not TransferStatus.OK:
            return f"{result.status}: {result.error}" if result.error else str(result.status)
    assert buffer.view is not None  # staging memory is host memory
    try:
        await asyncio.to_thread(verify, info, layers, buffer.view, auth)
    except IntegrityError as error:
        return str(error)
    return ""

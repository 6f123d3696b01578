"""Reads one stored object whole, a few layers at a time, and compares its checksums.

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
    from cacheflow.memory import Lease
    from cacheflow.types import ChunkInfo

__all__ = ["Finding", "verify_object"]

_STEP_BYTES: Final = 8 << 20
"""Bytes read and verified at a time, but at least one layer."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What reading one object showed; ``error`` is empty when all is well."""

    name: str
    nbytes: int
    error: str = ""


async def verify_object(backend: StorageBackend, info: ChunkInfo) -> Finding:
    """Read and verify all layers of ``info``; stops at the first bad run."""
    name = format_name(info.key)
    stride = max(info.block_sizes(info.key.layers))
    step = max(1, _STEP_BYTES // stride)
    pool = StagingPool(min(step, len(info.key.layers)) * stride)
    try:
        for first in range(info.key.layers.start, info.key.layers.stop, step):
            layers = Span(first, min(first + step, info.key.layers.stop))
            with await pool.lease(layers_bytes := info.layer_range(layers)[1]) as lease:
                if error := await _verify_layers(backend, info, layers, lease, layers_bytes):
                    return Finding(name, info.nbytes, error)
    finally:
        await pool.aclose()
    return Finding(name, info.nbytes)


async def _verify_layers(
    backend: StorageBackend, info: ChunkInfo, layers: Span, lease: Lease, nbytes: int
) -> str:
    buffer = lease.part(0, nbytes)
    read = Read(info.key, info.layer_range(layers)[0], buffer)
    for result in [result async for result in backend.load([read])]:
        if result.status is not TransferStatus.OK:
            return f"{result.status}: {result.error}" if result.error else str(result.status)
    assert buffer.view is not None  # staging memory is host memory
    try:
        await asyncio.to_thread(verify, info, layers, buffer.view)
    except IntegrityError as error:
        return str(error)
    return ""

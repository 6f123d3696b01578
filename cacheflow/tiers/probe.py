"""Finding out whether a tier is well again, without a request having to."""

from __future__ import annotations

import mmap
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header
from cacheflow.memory import InFlight, buffer_from
from cacheflow.types import ChunkKey, Read, TransferStatus

if TYPE_CHECKING:
    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["BadObjectError", "probe"]

_NOBODY: Final = ChunkKey(bytes(32))


class BadObjectError(Exception):
    """The store answers, but the object that was asked for could not be had."""


async def probe(backend: StorageBackend, key: ObjectKey | None) -> None:
    """Look ``key`` up and read its header; None: only look up what nobody has.

    Where the object is not listed (any more) the lookup's answer has to do.

    Raises:
        BadObjectError: its header could not be read, or other bytes came.
        Exception: whatever the backend raises.
    """
    chunk = _NOBODY if key is None else key.chunk
    [infos] = await backend.lookup([chunk])
    info = next((info for info in infos if info.key == key), None)
    if info is not None:
        await _read_header(backend, info)


async def _read_header(backend: StorageBackend, info: ChunkInfo) -> None:
    memory, hold = memoryview(mmap.mmap(-1, info.payload_offset)), InFlight()
    buffer = buffer_from(memory, hold)
    try:
        async with aclosing(backend.load([Read(info.key, 0, buffer)])) as results:
            found = [result async for result in results]
    finally:
        hold.when_idle(lambda: _let_go(memory))
    if [result.status for result in found] != [TransferStatus.OK]:
        raise BadObjectError(f"a probe's read ended with {found}")
    try:
        same = decode_header(memory) == info
    except IntegrityError:
        same = False
    if not same:
        raise BadObjectError(f"a probe read something else than the header of {info.key!r}")


def _let_go(memory: memoryview) -> None:
    """Whoever has yet to release the hold has a reference to this, and so to the memory."""

"""Requests that no store can serve are mistakes of the caller: refused before anything is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import Buffer, Extent, Read, Write

__all__ = ["check_extents", "check_reads", "check_writes"]


def check_reads(reads: Sequence[Read], *, device: bool = False) -> None:
    """Raises ValueError for a range that no object has, or memory that the CPU cannot touch (which
    is fine with ``device``)."""
    for read in reads:
        if read.offset < 0:
            raise ValueError(f"a read begins at byte {read.offset} of {read.key!r}")
        if not (device and read.buffer.kind is MemoryKind.DEVICE):
            _check_host_memory(read.buffer)


def check_extents(extents: Sequence[Extent]) -> None:
    """Raises ValueError for a range that no object has."""
    for extent in extents:
        if extent.offset < 0 or extent.nbytes < 0:
            raise ValueError(
                f"{extent.nbytes} bytes from byte {extent.offset} of {extent.key!r} are no range"
            )


def check_writes(writes: Sequence[Write]) -> None:
    """Raises ValueError for parts that are not the object they are said to be."""
    for write in writes:
        if write.nbytes != write.info.nbytes:
            raise ValueError(
                f"{write.nbytes} bytes were given for {write.info.key!r}, which has "
                f"{write.info.nbytes}"
            )
        for part in write.parts:
            _check_host_memory(part)


def _check_host_memory(buffer: Buffer) -> None:
    if buffer.view is None:
        raise ValueError(f"this backend reads and writes host memory only, not {buffer.kind}")

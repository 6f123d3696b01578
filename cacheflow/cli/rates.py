"""Quick measurements of this machine: disk, memory copy and checksum rates.

Each lasts a fraction of a second, so the figures say "which order of magnitude", not "how fast
exactly": ``make bench-storage`` is the careful one. Knows nothing about stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["DiskRates", "copy_rate", "disk_rates", "hash_rate", "supports_direct"]

_BLOCK: Final = 4 << 20
_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Sequential rates of one folder in bytes a second; ``direct``: past the page cache."""

    read: float
    write: float
    direct: bool


def copy_rate(seconds: float = 0.2) -> float:
    """Bytes a second of a memory copy of 16 MiB blocks, one thread."""
    size = 16 << 20
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    start, end = (ctypes.addressof(ctypes.c_char.from_buffer(area)) for area in (source, target))
    ctypes.memset(start, 1, size)
    return _rate(lambda: ctypes.memmove(end, start, size), size, seconds)


def hash_rate(seconds: float = 0.2) -> float:
    """Bytes a second of XXH3-64 over 1 MiB blocks, one thread."""
    block = os.urandom(1 << 20)
    return _rate(lambda: xxhash.xxh3_64_intdigest(block), len(block), seconds)


def supports_direct(folder: Path) -> bool:
    """Whether ``folder``'s file system takes O_DIRECT writes and reads.

    Raises:
        OSError: nothing can be written there at all.
    """
    with _scratch(folder) as path, mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            descriptor = os.open(path, os.O_RDWR | _O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        try:
            os.pwrite(descriptor, page, 0)
            os.preadv(descriptor, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(descriptor)
    return bool(_O_DIRECT)


def disk_rates(
    folder: Path, *, direct: bool, nbytes: int = 128 << 20, seconds: float = 1.0
) -> DiskRates:
    """Write, then read, up to ``nbytes`` in blocks of 4 MiB, at most ``seconds`` each way.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    flag = _O_DIRECT if direct else 0
    with _scratch(folder) as path, mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))
        descriptor = os.open(path, os.O_RDWR | flag)
        try:
            begun = time.perf_counter()
            written = _blocks(lambda at: os.pwrite(descriptor, block, at), nbytes, seconds)
            os.fsync(descriptor)
            write = written / (time.perf_counter() - begun)
            if hasattr(os, "posix_fadvise"):  # elsewhere the page cache may answer the reads
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            count = _blocks(lambda at: os.preadv(descriptor, [block], at), written, seconds)
            read = count / (time.perf_counter() - begun)
        finally:
            os.close(descriptor)
    return DiskRates(read=read, write=write, direct=direct)


def _blocks(transfer: Callable[[int], int], nbytes: int, seconds: float) -> int:
    """Bytes moved by ``transfer(offset)`` from 0 on, until ``nbytes`` or the time is up."""
    deadline = time.perf_counter() + seconds
    offset = 0
    while offset < nbytes and (moved := transfer(offset)) and time.perf_counter() < deadline:
        offset += moved
    return max(offset, 1)


def _rate(work: Callable[[], object], nbytes: int, seconds: float) -> float:
    work()
    begun = time.perf_counter()
    rounds = 0
    while (passed := time.perf_counter() - begun) < seconds:
        work()
        rounds += 1
    return rounds * nbytes / passed


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[str]:
    """An empty file in ``folder`` that is gone afterwards."""
    descriptor, path = tempfile.mkstemp(prefix=".cacheflow-doctor-", dir=folder)
    os.close(descriptor)
    try:
        yield path
    finally:
        os.unlink(path)

"""Single files: O_DIRECT where the file system takes it, whole ranges, honest sizes.

Knows nothing of objects, names or folders. Blocking calls: run them on I/O threads.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING, Final

from cacheflow.types import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.types import Buffer

__all__ = ["O_DIRECT", "DirectIo", "read_file", "sync_folder", "write_new"]

_log = logging.getLogger(__name__)

O_DIRECT: Final = getattr(os, "O_DIRECT", 0)
"""Where the system has no such flag: 0, and everything goes through the page cache."""


class DirectIo:
    """Whether O_DIRECT is used in one folder; falls back once, with one warning."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self.folder = folder
        self.on = wanted and O_DIRECT != 0
        self._warned = False

    def open(self, path: Path, flags: int) -> int:
        """Open with O_DIRECT.

        Raises:
            OSError: EINVAL where the file system has no O_DIRECT.
        """
        return os.open(path, flags | O_DIRECT | os.O_CLOEXEC, 0o600)

    def refused(self, error: OSError) -> bool:
        """Whether ``error`` says that O_DIRECT does not work here; it is off from then on."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        self.on = False
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: the file system has no O_DIRECT; I/O goes through the page cache", self.folder
            )
        return True


def read_file(direct: DirectIo, path: Path, buffer: Buffer, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the end of the file.

    A range or buffer that is not page-aligned is read through the page cache.
    """
    if direct.on and not (buffer.address | buffer.nbytes | offset) % PAGE:
        try:
            return _read(direct.open(path, os.O_RDONLY), buffer, offset, PAGE)
        except OSError as error:
            if not direct.refused(error):
                raise
    return _read(os.open(path, os.O_RDONLY | os.O_CLOEXEC), buffer, offset, 1)


def _read(descriptor: int, buffer: Buffer, offset: int, unit: int) -> int:
    assert buffer.view is not None  # checked before the read was accepted
    done = 0
    try:
        while done < buffer.nbytes:
            count = os.preadv(descriptor, [buffer.view[done:]], offset + done)
            done += count
            # O_DIRECT gives less than whole pages only at the end of the file, and asking for the
            # rest from there would be refused as unaligned.
            if count == 0 or count % unit:
                break
    finally:
        os.close(descriptor)
    return done


def write_new(direct: DirectIo, path: Path, parts: Sequence[Buffer], *, fsync: bool) -> None:
    """Write ``parts`` one after another to a file that must not exist yet.

    Parts of whole pages go to the disk past the page cache; those that are not aligned in memory
    are copied first.

    Raises:
        OSError: as the system says; a disk that fills up is ENOSPC even where it shows itself as a
            short write. The file may be left behind: the caller removes it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct.on and not any(part.nbytes % PAGE for part in parts):
        try:
            return _write(direct.open(path, flags), parts, PAGE, fsync)
        except OSError as error:
            if not direct.refused(error):
                raise
            # Some file systems refuse only when the first bytes come: the file is there by then.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return _write(os.open(path, flags | os.O_CLOEXEC, 0o600), parts, 1, fsync)


def _write(descriptor: int, parts: Sequence[Buffer], unit: int, fsync: bool) -> None:
    try:
        at = 0
        for part in parts:
            _write_part(descriptor, part, at, unit)
            at += part.nbytes
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_part(descriptor: int, part: Buffer, at: int, unit: int) -> None:
    assert part.view is not None  # checked before the write was accepted
    if not part.nbytes:
        return
    if part.address % unit == 0:
        _write_all(descriptor, part.view, at, unit)
        return
    with mmap.mmap(-1, part.nbytes) as bounce, memoryview(bounce) as view:
        view[:] = part.view
        _write_all(descriptor, view, at, unit)


def _write_all(descriptor: int, view: memoryview, at: int, unit: int) -> None:
    done = 0
    while done < len(view):
        count = os.pwritev(descriptor, [view[done:]], at + done)
        done += count
        if count == 0 or (count % unit and done < len(view)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

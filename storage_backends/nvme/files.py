"""File primitives: aligned direct reads and writes that notice what is short. No names, no tasks."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING

from cacheflow.types import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.types import Buffer

__all__ = ["DirectIo", "read_range", "write_new"]

_log = logging.getLogger(__name__)


class DirectIo:
    """Whether O_DIRECT is used in one folder; falls back once, with one warning."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self.folder = folder
        self.on = wanted
        self._warned = False

    @property
    def flag(self) -> int:
        return os.O_DIRECT if self.on else 0

    def open(self, path: Path | str, flags: int) -> int:
        """Open with O_DIRECT where possible."""
        if self.on:
            try:
                return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.refuse()
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def refuse(self) -> None:
        """The file system does not take O_DIRECT."""
        self.on = False
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: the file system has no O_DIRECT; reading through the page cache", self.folder
            )


def aligned(buffer: Buffer, offset: int) -> bool:
    """Whether O_DIRECT takes this transfer as it is."""
    return not (buffer.address | buffer.nbytes | offset) % PAGE


def read_range(descriptor: int, buffer: Buffer, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
    assert buffer.view is not None
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(descriptor, [buffer.view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_new(
    direct: DirectIo, path: Path, parts: Sequence[Buffer], *, fsync: bool
) -> None:
    """Write ``parts`` one after another to a file that must not exist yet.

    Raises:
        OSError: as the system says; a disk that fills up is ENOSPC even where it shows itself as a
            short write. The file may be left behind: the caller removes it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    whole = not sum(part.nbytes for part in parts) % PAGE
    descriptor = direct.open(path, flags) if whole else os.open(path, flags | os.O_CLOEXEC, 0o600)
    is_direct = whole and direct.on
    try:
        at = 0
        for part in parts:
            at += _write_part(descriptor, part, at, is_direct)
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_part(descriptor: int, part: Buffer, at: int, is_direct: bool) -> int:
    assert part.view is not None
    if is_direct and not aligned(part, at):
        if part.nbytes % PAGE or at % PAGE:
            raise OSError(errno.EINVAL, "parts of an object must be whole pages for O_DIRECT")
        with mmap.mmap(-1, part.nbytes) as bounce:
            bounce[:] = part.view
            view = memoryview(bounce)
            try:
                return _write_all(descriptor, view, at)
            finally:
                view.release()
    return _write_all(descriptor, part.view, at)


def _write_all(descriptor: int, view: memoryview, at: int) -> int:
    done = 0
    while done < len(view):
        count = os.pwritev(descriptor, [view[done:]], at + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
    return done

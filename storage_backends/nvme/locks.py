"""Byte-range locks on an open file: who is alive, and whose turn it is.

Linux open-file-description locks. They belong to an open file, not to a process: two stores opened
in one process exclude each other too. The kernel drops them when the file's last descriptor closes,
kill -9 included, so they need no process ids and work between containers. A process forked with
the file open keeps them. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from typing import Final

__all__ = ["is_locked", "try_lock", "unlock"]

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""``struct flock``: type, whence, start, length, and a process id that must be 0 here."""
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)


def try_lock(descriptor: int, byte: int) -> bool:
    """Lock ``byte`` now; False if another open file has it.

    Raises:
        OSError: ENOLCK and the like where the system or the file system has no such locks.
    """
    if not hasattr(fcntl, "F_OFD_SETLK"):
        # Those of a process would not keep two stores in it apart, and go with the first to close.
        raise OSError(errno.ENOLCK, f"{sys.platform} has no locks of open files")
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, byte))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Let ``byte`` go."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, byte))


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another open file has ``byte`` locked."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, byte))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _range(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)

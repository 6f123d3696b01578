"""Moving a file to a name in one step, keeping what was there before.

``renameat2`` exchanges two names atomically (ext4, xfs, btrfs, tmpfs, overlayfs on them): nobody
ever sees the name without a file, and what was replaced is there to be counted and removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["CannotExchange", "exchange_into"]

_AT_FDCWD: Final = -100
_NOREPLACE: Final = 1
_EXCHANGE: Final = 2
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class CannotExchange(OSError):
    """The system or the file system has no atomic exchange of names; nothing was moved."""


def exchange_into(source: Path, target: Path) -> None:
    """Move ``source`` to ``target``; what lay there, if anything, is then called ``source``.

    Raises:
        CannotExchange: not possible here.
        OSError: as the system says; nothing was moved.
    """
    while True:
        try:
            return _renameat2(source, target, _NOREPLACE)
        except FileExistsError:
            pass
        try:
            return _renameat2(source, target, _EXCHANGE)
        except FileNotFoundError:  # the target was removed in between: try again
            if not os.path.lexists(source):
                raise


def _renameat2(source: Path, target: Path, flags: int) -> None:
    call = _found()
    if call is None:
        raise CannotExchange(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        raise CannotExchange(code, os.strerror(code))
    raise OSError(code, os.strerror(code), str(source), None, str(target))


def _found() -> Callable[..., int] | None:
    return getattr(_LIBC, "renameat2", None)


_LIBC: Final = ctypes.CDLL(None, use_errno=True)

"""Headers of stored objects, read once and trusted as long as the file is the same file.

The same rule decides whether an object exists for ``lookup`` and for ``scan``: its name, its header
and its size agree.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header, header_size
from cacheflow.types import PAGE

if TYPE_CHECKING:
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["HeaderIndex", "read_header"]

_CAPACITY: Final = 200_000
"""Headers kept in memory (a few hundred bytes to a few kilobytes each)."""


class HeaderIndex:
    """A bounded cache ``path -> ChunkInfo``, checked against inode, size and times by one stat.

    Used from I/O threads; every operation is one dictionary step under the GIL.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[tuple[int, ...], ChunkInfo]] = OrderedDict()

    def get(self, key: ObjectKey, path: str) -> ChunkInfo | None:
        """The object's info, or None if there is nothing at ``path``.

        Raises:
            OSError: anything but a missing file.
            IntegrityError: something is there but it is not the object its name says.
        """
        try:
            found = os.lstat(path)
            mark = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == mark:
                return known[1]
            if not stat.S_ISREG(found.st_mode):  # a link or a pipe could lead or block anywhere
                raise IntegrityError("it is not a plain file")
            info = read_header(key, path, found.st_size)
        except FileNotFoundError:
            self._known.pop(path, None)
            return None
        self._known[path] = (mark, info)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return info

    def forget(self, path: str) -> None:
        """The file was replaced or removed."""
        self._known.pop(path, None)


def read_header(key: ObjectKey, path: str, size: int) -> ChunkInfo:
    """Read and check the header of the file at ``path`` (of ``size`` bytes).

    Raises:
        IntegrityError: name, header and size do not agree.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, PAGE, 0)
        wanted = header_size(data)
        if wanted > len(data):
            data += os.pread(descriptor, wanted - len(data), len(data))
    finally:
        os.close(descriptor)
    info = decode_header(data, expect=key)
    if info.nbytes != size:
        raise IntegrityError(f"the file has {size} bytes, its header says {info.nbytes}")
    return info

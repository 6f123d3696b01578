"""Headers of stored objects, read once and trusted as long as the object is the same object.

The same rule decides whether an object exists for ``lookup`` and for ``scan``: its name, its header
and its size agree. What is damaged is remembered too, and is not read again until it changes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header, header_size
from cacheflow.types import PAGE

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["Headers", "Listed"]

_log = logging.getLogger(__name__)
_CAPACITY: Final = 200_000
"""Headers kept in memory (a few hundred bytes to a few kilobytes each)."""
_FIRST_GUESS: Final = 2 * PAGE
_LARGEST_GUESS: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a listing that is an object of ours by its name."""

    key: ObjectKey
    path: str
    nbytes: int
    tag: str | None
    """Changes with the content (the ETag); None where the store has none."""


class Headers:
    """A bounded cache ``path -> ChunkInfo``, checked against the tag and size of a listing."""

    def __init__(self, store: ObjectStore, where: str, capacity: int = _CAPACITY) -> None:
        self._store = store
        self._where = where
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[str, int, ChunkInfo | None]] = OrderedDict()
        self._guess = _FIRST_GUESS
        """Bytes that are likely to hold a header: the largest one seen lately, within bounds."""

    def knows(self, listed: Listed) -> bool:
        """Whether :meth:`info` can answer."""
        known = self._known.get(listed.path)
        return known is not None and known[:2] == (listed.tag, listed.nbytes)

    def info(self, listed: Listed) -> ChunkInfo | None:
        """What is known of the object; None if it is not valid."""
        return self._known[listed.path][2]

    async def read(self, listed: Listed) -> ChunkInfo | None:
        """Read the header; None if the object is gone or not valid.

        One request, two where the header is larger than any seen before.
        """
        if not listed.nbytes:  # stores refuse to read a range of nothing
            return None
        try:
            info, tag, nbytes = await self._fetch(listed.key, listed.path)
        except FileNotFoundError:
            return None
        if tag is not None:
            self._known[listed.path] = (tag, nbytes, info)
            self._known.move_to_end(listed.path)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return info

    async def _fetch(self, key: ObjectKey, path: str) -> tuple[ChunkInfo | None, str | None, int]:
        data, tag, nbytes = await self._front(path, self._guess)
        try:
            size = header_size(data)
            if size > len(data):
                data, tag, nbytes = await self._front(path, size)
            self._guess = min(max(self._guess, size), _LARGEST_GUESS)
            info = decode_header(data, expect=key)
            if info.nbytes != nbytes:
                raise IntegrityError(f"it has {nbytes} bytes, its header says {info.nbytes}")
        except IntegrityError as error:
            _log.warning("%s/%s is not served: %s", self._where, path, error)
            return None, tag, nbytes
        return info, tag, nbytes

    async def _front(self, path: str, nbytes: int) -> tuple[memoryview, str | None, int]:
        """The first bytes of an object, with the tag and size of the very same object."""
        found = await self._store.get_async(path, options={"range": (0, nbytes)})
        data = memoryview(await found.bytes_async())
        tag = found.meta["e_tag"]
        return data, None if tag is None else tag.strip('"'), found.meta["size"]

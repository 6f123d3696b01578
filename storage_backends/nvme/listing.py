"""Which objects a chunk has: a folder listing kept as long as the folder has not changed.

A folder whose time stamp is too fresh is listed again next time: two changes within one tick of
the file system's clock would look like one. The clock may have been ahead when the folder was last
changed: its time stamp is then to come, for hours perhaps, and settled once it has stayed the same
for long enough.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import TYPE_CHECKING, Final

from cacheflow.kv import parse_name

if TYPE_CHECKING:
    from cacheflow.storage_backends.nvme.folder import StoreFolder
    from cacheflow.types import ChunkKey, ObjectKey

__all__ = ["Listing"]

_SETTLED_NS: Final = 1_000_000_000
_DIGEST: Final = 64
"""Hex digits that an object's name begins with."""


class Listing:
    """Names by chunk, per fan-out folder. Used from I/O threads."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, dict[str, list[str]]]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        """Of folders whose time stamp was fresh: it, and when that was seen first."""

    def objects(self, chunk: ChunkKey) -> list[tuple[ObjectKey, str]]:
        """Objects of ``chunk`` by name; whether they are valid is not looked at."""
        digest = chunk.digest.hex()
        fan = digest[:2]
        found = []
        for name in self._fan(fan).get(digest, ()):
            with contextlib.suppress(ValueError):
                found.append((parse_name(name), f"{self._folder.objects}/{fan}/{name}"))
        return found

    def forget(self, chunk: ChunkKey) -> None:
        """This process changed something of the chunk's."""
        self._known.pop(chunk.digest.hex()[:2], None)

    def _fan(self, fan: str) -> dict[str, list[str]]:
        path = f"{self._folder.objects}/{fan}"
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return {}
        if not stat.S_ISDIR(there.st_mode):
            return {}
        changed = there.st_mtime_ns
        known = self._known.get(fan)
        if known is not None and known[0] == changed:
            return known[1]
        found: dict[str, list[str]] = {}
        for name in os.listdir(path):  # noqa: PTH208 - names only
            found.setdefault(name[:_DIGEST], []).append(name)
        if time.time_ns() - changed > _SETTLED_NS or self._has_stayed(fan, changed):
            self._known[fan] = (changed, found)
        return found

    def _has_stayed(self, fan: str, changed: int) -> bool:
        now, seen = time.monotonic_ns(), self._seen.get(fan)
        if seen is None or seen[0] != changed:
            self._seen[fan] = (changed, now)
            return False
        return now - seen[1] > _SETTLED_NS

"""The folder of a store: its manifest, its names, its files.

::

    cacheflow-store.json           what this is, in which version; without it nothing is touched
    ledger                         bytes in use, shared by all processes (see ledger.py)
    objects/ab/NAME                one file an object, ``ab`` the first byte of the digest
    tmp/TOKEN                      being written or removed; TOKEN is in its process's ledger entry

Files in ``objects`` that have another name or place are not ours to judge: they count, are
reported, and are left alone. Blocking calls: run them on I/O threads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import format_name, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheflow.types import ObjectKey

__all__ = ["FOLDER_FORMAT", "MANIFEST", "FoundFile", "StoreFolder"]

MANIFEST: Final = "cacheflow-store.json"
FOLDER_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file below ``objects``; ``key`` is None if its name and place are not an object's."""

    path: Path
    key: ObjectKey | None
    nbytes: int
    modified: float
    """Seconds since the epoch: when an object was stored."""


class StoreFolder:
    """Paths and the manifest of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "objects"
        self.temporary = root / "tmp"
        self.ledger = root / "ledger"

    def check_is_free_or_ours(self, create: bool) -> bool:
        """True if a manifest is there, False if the folder is free to become a store.

        Raises:
            ConfigError: missing (and not to be made), not a folder, or holding something else.
        """
        try:
            names = {path.name for path in self.root.iterdir()}
        except FileNotFoundError:
            if not create:
                raise ConfigError(
                    f"{self.root}: no such folder, and option create is off"
                ) from None
            return False
        except NotADirectoryError:
            raise ConfigError(f"{self.root} is not a folder") from None
        except OSError as error:
            raise ConfigError(f"{self.root} cannot be read: {error.strerror}") from error
        if MANIFEST in names:
            return True
        if names and not self._was_never_finished(names):
            raise ConfigError(
                f"{self.root} is not a CacheFlow store: it holds {len(names)} other entries and "
                f"no {MANIFEST}; give an empty folder"
            )
        if not create:
            raise ConfigError(f"{self.root} is empty, and option create is off")
        return False

    def _was_never_finished(self, names: set[str]) -> bool:
        """Our own folders, without an object: a store whose making was cut short, or goes on."""
        if not names <= {self.objects.name, self.temporary.name}:
            return False
        return not any(self.objects.iterdir()) if self.objects.name in names else True

    def check_manifest(self, data: bytes) -> None:
        """Raises IntegrityError for a manifest of another kind, ConfigError for another version."""
        try:
            found = json.loads(data)
            kind, version = found["kind"], found["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{self.root / MANIFEST} is damaged: {error!r}") from error
        if kind != "cacheflow-store":
            raise IntegrityError(f"{self.root / MANIFEST} says it is a {kind!r}")
        if version != FOLDER_FORMAT:
            raise ConfigError(
                f"{self.root} is a store of format {version}, this is format {FOLDER_FORMAT}: "
                f"use the matching version of CacheFlow or another folder"
            )

    def check_no_links(self) -> None:
        """Whoever may link a folder of ours to elsewhere has us write and remove files there.

        Raises:
            ConfigError: one of the store's own folders is a link, or no folder.
        """
        for folder in (self.objects, self.temporary):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(
                    f"{folder} is no folder: it was not made by a store; move it away"
                )
        for folder in (self.objects, self.temporary, *(self.objects / fan for fan in self._fans())):
            if folder.is_symlink():
                raise ConfigError(
                    f"{folder} is a link, and a store's own folders have to lie in it; to keep the "
                    f"store elsewhere, move all of it and give that path"
                )

    def manifest(self) -> bytes:
        """The manifest of a new store."""
        return json.dumps({"kind": "cacheflow-store", "format": FOLDER_FORMAT}).encode() + b"\n"

    def make(self) -> None:
        """Make the folders, readable by their owner only.

        Raises:
            ConfigError: the folder, or its parent, cannot be written; says what to do.
        """
        for folder in (self.root, self.objects, self.temporary):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                done = "made" if folder is self.root else "written"
                what = f"{self.root} cannot be {done}: {error.strerror}"
                raise ConfigError(what + self._advice(error)) from error

    def remake(self) -> None:
        """Make what is missing of a store that is open: somebody cleared it out, and took its
        folders along.

        Raises:
            OSError: as the system says; so if the store itself is gone.
        """
        for folder in (self.objects, self.temporary):
            folder.mkdir(mode=0o700, exist_ok=True)

    def _advice(self, error: OSError) -> str:
        """What to do about a folder that could not be made."""
        if error.errno in (errno.EACCES, errno.EPERM):
            parent = os.path.dirname(error.filename or self.root)  # noqa: PTH120 - or bytes
            return f"; let user {os.geteuid()} write in {parent}, or give another folder"
        if error.errno == errno.EROFS:
            return "; mount it for writing, or give another folder"
        return ""

    def refusal(self) -> int:
        """Why nothing can be written here though it could be read: an ``errno``; 0 if it can."""
        if os.access(self.root, os.W_OK):
            return 0
        return errno.EROFS if os.statvfs(self.root).f_flag & os.ST_RDONLY else errno.EACCES

    def path(self, key: ObjectKey) -> Path:
        """Where an object lies."""
        name = format_name(key)
        return self.objects / name[:2] / name

    def new_temporary(self) -> Path:
        """A name in ``tmp`` that nobody else uses."""
        return self.temporary / secrets.token_hex(8)

    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def size_bytes(self) -> int:
        """Bytes of the whole file system."""
        found = os.statvfs(self.root)
        return found.f_blocks * found.f_frsize

    def all(self) -> Iterator[tuple[ObjectKey, str]]:
        """Every file whose name and place are an object's, by name alone; strings, as there may be
        a hundred thousand."""
        for fan in self._fans():
            if (self.objects / fan).is_symlink():
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(self.objects / fan):  # noqa: PTH208 - names only
                    if (key := _key(fan, name)) is not None:
                        yield key, f"{self.objects}/{fan}/{name}"

    def files(self) -> Iterator[FoundFile]:
        """Every file below ``objects``, whatever it is; folders are looked into once."""
        for fan in self._fans():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield from self._files_in(fan)

    def _files_in(self, fan: str) -> Iterator[FoundFile]:
        folder = self.objects / fan
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):  # a link, too, whatever it leads to
            yield FoundFile(folder, None, found.st_size, found.st_mtime)
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(found.st_mode):
                        key = _key(fan, entry.name)
                        path = folder / entry.name
                        yield FoundFile(path, key, found.st_size, found.st_mtime)

    def _fans(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.objects))  # noqa: PTH208 - names only
        return []

    def clear_temporary(self) -> int:
        """Remove all unfinished files: only while no other process has the store open."""
        removed = 0
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.temporary):  # noqa: PTH208 - names only
                with contextlib.suppress(OSError):
                    (self.temporary / name).unlink()
                    removed += 1
        return removed


def _key(fan: str, name: str) -> ObjectKey | None:
    if name.startswith(fan) and len(fan) == 2:
        with contextlib.suppress(ValueError):
            return parse_name(name)
    return None

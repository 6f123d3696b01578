"""The folder of a store: its manifest, its names, its temporary files.

::

    cacheflow-store.json     what this is, and in which version; without it nothing is touched
    objects/ab/NAME          one file an object, ``ab`` the first byte of the digest
    tmp/PID-START-N          being written; reaped when the process that wrote it is gone

Blocking calls: run them on I/O threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import format_name, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.types import ChunkKey, ObjectKey

__all__ = ["FOLDER_FORMAT", "MANIFEST", "StoreFolder"]

MANIFEST: Final = "cacheflow-store.json"
FOLDER_FORMAT: Final = 1


class StoreFolder:
    """Paths and the manifest of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "objects"
        self.temporary = root / "tmp"
        self.writable = True
        self._numbers = itertools.count()
        self._prefix = f"{os.getpid()}-{_started(os.getpid())}"

    def check_is_free_or_ours(self, create: bool) -> bool:
        """True if a manifest is there, False if the folder is free to become a store.

        Raises:
            ConfigError: missing (and not to be made), not a folder, or holding something else.
        """
        if not self.root.exists():
            if not create:
                raise ConfigError(f"{self.root}: no such folder (option create is off)")
            return False
        if not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder")
        try:
            names = os.listdir(self.root)
        except OSError as error:
            raise ConfigError(f"{self.root} cannot be read: {error.strerror}") from error
        if MANIFEST in names:
            return True
        if names:
            raise ConfigError(
                f"{self.root} is not a CacheFlow store: it holds {len(names)} other entries and "
                f"no {MANIFEST}; give an empty folder"
            )
        if not create:
            raise ConfigError(f"{self.root} is empty and option create is off")
        return False

    def check_manifest(self, text: str) -> None:
        """Raises IntegrityError for a manifest of another kind, ConfigError for another version."""
        try:
            found = json.loads(text)
            kind, version = found["kind"], found["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{self.root / MANIFEST} is damaged: {error}") from error
        if kind != "cacheflow-store":
            raise IntegrityError(f"{self.root / MANIFEST} says it is a {kind!r}")
        if version != FOLDER_FORMAT:
            raise ConfigError(
                f"{self.root} is a store of format {version}, this is format {FOLDER_FORMAT}: "
                f"use the matching version of CacheFlow or another folder"
            )

    def manifest(self) -> str:
        """The manifest of a new store."""
        return json.dumps({"kind": "cacheflow-store", "format": FOLDER_FORMAT}) + "\n"

    def make(self) -> None:
        """Make the folders, readable by their owner only.

        Raises:
            ConfigError: the parent cannot be written.
        """
        try:
            for folder in (self.root, self.objects, self.temporary):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.root} cannot be made: {error.strerror}") from error

    def path(self, key: ObjectKey) -> Path:
        """Where an object lies."""
        name = format_name(key)
        return self.objects / name[:2] / name

    def new_temporary(self) -> Path:
        """A name in ``tmp`` that no process uses."""
        return self.temporary / f"{self._prefix}-{next(self._numbers)}"


    def all(self) -> Iterator[tuple[ObjectKey, Path]]:
        """Every file whose name is an object's; anything else is not ours to judge."""
        with contextlib.suppress(FileNotFoundError):
            for fan in sorted(os.scandir(self.objects), key=lambda entry: entry.name):
                if fan.is_dir(follow_symlinks=False):
                    for entry in os.scandir(fan.path):
                        with contextlib.suppress(ValueError):
                            yield parse_name(entry.name), Path(entry.path)

    def reap_temporaries(self) -> int:
        """Remove files that processes which are gone were writing; returns how many."""
        reaped = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.temporary):
                pid, _, rest = entry.name.partition("-")
                start = rest.partition("-")[0]
                if pid.isdigit() and _started(int(pid)) != start:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        reaped += 1
        return reaped


def _started(pid: int) -> str:
    """When process ``pid`` started, in clock ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

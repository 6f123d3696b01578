"""The folder of a store: its manifest, its names, its temporary files.

::

    cacheflow-store.json           what this is, in which version; without it nothing is touched
    objects/ab/NAME                one file an object, ``ab`` the first byte of the digest
    tmp/HOST-PID-START-TOKEN       being written; reaped when the process that wrote it is gone

HOST names the boot and the process-id namespace: several machines or containers can share a folder
without taking each other's files for leftovers. Blocking calls: run them on I/O threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import format_name, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.types import ObjectKey

__all__ = ["FOLDER_FORMAT", "MANIFEST", "StoreFolder"]

MANIFEST: Final = "cacheflow-store.json"
FOLDER_FORMAT: Final = 1
_ABANDONED_SECONDS: Final = 86_400.0
"""Age at which another host's unfinished file is a leftover: no write takes a day."""


class StoreFolder:
    """Paths and the manifest of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "objects"
        self.temporary = root / "tmp"

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

    def manifest(self) -> bytes:
        """The manifest of a new store."""
        return json.dumps({"kind": "cacheflow-store", "format": FOLDER_FORMAT}).encode() + b"\n"

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
        """A name in ``tmp`` that nobody else uses."""
        pid = os.getpid()
        return self.temporary / f"{_host()}-{pid}-{_started(pid)}-{secrets.token_hex(8)}"

    def all(self) -> Iterator[tuple[ObjectKey, Path]]:
        """Every file whose name and place are an object's; anything else is not ours to judge."""
        with contextlib.suppress(FileNotFoundError):
            for fan in sorted(path.name for path in self.objects.iterdir()):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for name in os.listdir(self.objects / fan):  # noqa: PTH208 - names only
                        if name.startswith(fan):
                            with contextlib.suppress(ValueError):
                                yield parse_name(name), self.objects / fan / name

    def reap_temporaries(self) -> int:
        """Remove files whose writers are gone; returns how many."""
        reaped = 0
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.temporary):  # noqa: PTH208 - names only
                with contextlib.suppress(OSError):
                    if self._is_abandoned(name):
                        (self.temporary / name).unlink()
                        reaped += 1
        return reaped

    def _is_abandoned(self, name: str) -> bool:
        host, _, rest = name.partition("-")
        pid, _, rest = rest.partition("-")
        if host == _host() and pid.isdigit():
            return _started(int(pid)) != rest.partition("-")[0]
        return time.time() - (self.temporary / name).stat().st_mtime > _ABANDONED_SECONDS


@functools.cache
def _host() -> str:
    """This boot and process-id namespace: where a process id means something."""
    parts: list[str] = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii"))
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.blake2s("".join(parts).encode(), digest_size=6).hexdigest()


def _started(pid: int) -> str:
    """When process ``pid`` started, in clock ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

"""Options of the nvme backend, and what those mean that depend on the file system."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import ByteSize, Field, field_validator

from cacheflow.storage_backends.options import Options

__all__ = ["NvmeOptions"]

_CAP_SHARE: Final = 0.5
_FLOOR_SHARE: Final = 0.2
"""Of the file system; Kubernetes begins to evict pods when less than 15 % is free."""


class NvmeOptions(Options):
    """Options of the ``nvme`` backend."""

    path: Path
    """Folder of the store; made if it is missing (see ``create``)."""
    threads: int = Field(default=4, ge=1, le=256)
    """Reads and writes in flight at once."""
    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT: auto uses it where the file system has it, on insists."""
    fsync: bool = True
    """Force data and names to the disk before an object counts as stored."""
    create: bool = True
    """Make the folder if it is missing; False: a missing one is an error."""
    max_bytes: ByteSize | None = Field(default=None, ge=0)
    """Cap of all files of the store, unfinished ones included, whoever writes them; None: half of
    the file system. Give every process that shares the folder the same."""
    min_free_bytes: ByteSize | None = Field(default=None, ge=0)
    """Nothing is stored that would leave less free on the file system; None: a fifth of it, but
    never more than half of what the store and the free space have together."""

    @field_validator("path")
    @classmethod
    def _is_path(cls, path: Path) -> Path:
        if "\0" in str(path):
            raise ValueError("it holds a NUL, which no path can")
        return path

    def cap(self, size: int) -> int:
        """Bytes the store may have on a file system of ``size``."""
        return int(size * _CAP_SHARE) if self.max_bytes is None else self.max_bytes

    def floor(self, size: int, free: int, used: int) -> int:
        """Bytes to leave free on a file system of ``size``; ``used``: by the store."""
        if self.min_free_bytes is not None:
            return self.min_free_bytes
        return min(int(size * _FLOOR_SHARE), (free + used) // 2)

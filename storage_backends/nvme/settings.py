"""Options of the nvme backend."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cacheflow.storage_backends.options import Options

__all__ = ["NvmeOptions"]


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

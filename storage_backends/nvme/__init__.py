"""The nvme tier: one file an object, read with O_DIRECT, written atomically."""

from __future__ import annotations

from cacheflow.storage_backends.nvme.backend import NvmeBackend
from cacheflow.storage_backends.nvme.settings import NvmeOptions

__all__ = ["NvmeBackend", "NvmeOptions"]

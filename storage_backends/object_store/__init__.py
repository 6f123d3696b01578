"""The object store tier, over obstore: S3 and what speaks like it, GCS, Azure, a folder, memory."""

from __future__ import annotations

from cacheflow.storage_backends.object_store.backend import ObjectStoreBackend
from cacheflow.storage_backends.object_store.settings import ObjectStoreOptions

__all__ = ["ObjectStoreBackend", "ObjectStoreOptions"]

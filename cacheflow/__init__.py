"""CacheFlow: KV caches restored from both ends at once."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("cacheflow-kv")

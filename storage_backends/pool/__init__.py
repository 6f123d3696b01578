"""The pool tier: a store process, or several, whose memory many hosts share (docs/pool.md)."""

from __future__ import annotations

from cacheflow.storage_backends.pool.backend import PoolBackend
from cacheflow.storage_backends.pool.settings import PoolOptions

__all__ = ["PoolBackend", "PoolOptions"]

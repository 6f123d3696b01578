"""Valkey or Redis as a tier of CacheFlow."""

from __future__ import annotations

from cacheflow_valkey.backend import ValkeyBackend, ValkeyOptions

__all__ = ["ValkeyBackend", "ValkeyOptions"]

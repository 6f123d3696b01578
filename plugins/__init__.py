"""Engines that ship with CacheFlow; installed as `cacheflow.plugins`."""

"""Storage backends that ship with CacheFlow; installed as `cacheflow.storage_backends`."""

"""For those who build on CacheFlow: fakes, virtual time, and the backend conformance suite."""

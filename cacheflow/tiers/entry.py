"""One stored object as a tier remembers it: what eviction needs to know, and no table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.types import ChunkInfo, ObjectKey

__all__ = ["Entry", "entry_of"]


@dataclass(slots=True, eq=False)
class Entry:
    """Times are seconds on the tier's clock. Hashes as its key does, so that a policy which
    remembers hashes knows an object that comes back; two entries are never equal."""

    key: ObjectKey
    nbytes: int
    tenant: bytes
    start: int
    """First token of the segment in which the object's first token was computed."""
    stop: int
    """Behind the last token of the segment in which its last token was computed."""
    cells: int
    """Token-layers."""
    stored: float
    last_use: float
    uses: int = 0
    """Lookups that found it."""
    worth: float = 1.0
    """What one use saves, per byte."""
    boost: float = 1.0
    """The hint that is in force multiplies the worth."""
    reads: int = 0
    """Loads under way."""
    pinned_until: float = 0.0
    mark: int = field(init=False)

    def __post_init__(self) -> None:
        self.mark = hash(self.key)

    def __hash__(self) -> int:
        return self.mark


def entry_of(info: ChunkInfo, now: float) -> Entry:
    """The entry of an object that is there since ``now``."""
    segments = info.segments
    start = segments[0].start if segments else 0
    stop = segments[-1].stop if segments else info.layout.chunk_tokens
    cells = info.layout.chunk_tokens * len(info.key.layers)
    return Entry(info.key, info.nbytes, info.tenant_id, start, stop, cells, now, now)

"""What is to be stored: saves, their chunks tier by tier, and one bounded queue a tier.

A chunk waits until its KV is copied out of the engine, is then ready to be written, and ends one
way or another. Loop-owned state; does no I/O and does not know what ends mean.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.tiers.ranks import rank_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from cacheflow.kv import Stamp
    from cacheflow.restore.turns import Turn
    from cacheflow.tiers.ranks import Rank
    from cacheflow.tiers.staged import Copy
    from cacheflow.types import ChunkKey, Segment

__all__ = ["Chunk", "Save", "Saved", "WriteQueue"]


@dataclass(slots=True)
class Saved:
    """What one save did in one tier, in chunks; goes on counting until nothing is pending."""

    stored: int = 0
    kept: int = 0
    """Already there, at least as good."""
    dropped: int = 0
    """Refused by a cap, failed or given up; counted, logged, and recomputed when needed."""
    skipped: int = 0
    """Left out by the write policy, since any restore would recompute them, or by a tier that is
    full of what is worth more."""
    pending: int = 0
    """Waiting, or being stored."""


@dataclass(slots=True, eq=False)
class Save:
    """The whole chunks of one request that is open in the engine."""

    request_id: str
    keys: Sequence[ChunkKey]
    segments: tuple[Segment, ...]
    canonical_chunks: int
    exact_chunks: int
    """Leading chunks that no lossy codec has touched."""
    stamp: Stamp
    """Who stores."""
    saved: dict[str, Saved] = field(default_factory=dict)
    """By tier."""
    asking: int = 0
    """Tiers that have not said what they have."""
    waiting: OrderedDict[int, dict[str, Chunk]] = field(default_factory=OrderedDict)
    """What has to be copied out of the engine yet: by chunk, for which tiers."""
    leaving: bool = False
    """The request is about to be closed: it goes first."""
    last_call: bool = False
    """... now: what no tier has room for is lost."""
    gone: bool = False
    """The request is closed: nothing can be copied out any more."""

    def is_canonical(self, chunk: int) -> bool:
        """Whether the chunk was computed on the grid from the first token on."""
        return chunk < self.canonical_chunks

    def is_lossy(self, chunk: int) -> bool:
        """Whether a lossy codec has touched the chunk, or what it was computed from."""
        return chunk >= self.exact_chunks

    def rank(self, chunk: int) -> Rank:
        """How good a copy of the chunk is."""
        return rank_of(canonical=self.is_canonical(chunk), lossy=self.is_lossy(chunk))

    def waiting_for(self, tiers: Collection[str]) -> Iterator[int]:
        """Chunks that wait to be copied for any of ``tiers``, in order."""
        if tiers:
            yield from (
                i for i, wanted in self.waiting.items() if not wanted.keys().isdisjoint(tiers)
            )

    @property
    def is_captured(self) -> bool:
        """Whether nothing needs the engine any more."""
        return self.gone or not (self.asking or self.waiting)

    @property
    def is_settled(self) -> bool:
        """Whether every chunk has ended in every tier."""
        return not any(saved.pending for saved in self.saved.values())


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk of a save on its way into one tier."""

    save: Save
    tier: str
    index: int
    turn: Turn
    copy: Copy | None = None

    @property
    def key(self) -> ChunkKey:
        """What it is stored under."""
        return self.save.keys[self.index]


class WriteQueue:
    """What one tier has to store yet. ``max_bytes``: of the copies that are kept for it."""

    def __init__(self, max_bytes: int) -> None:
        self.waiting: OrderedDict[Chunk, None] = OrderedDict()
        self.ready: OrderedDict[Chunk, None] = OrderedDict()
        self.writing: set[Chunk] = set()
        self.held_bytes = 0
        """Of copies that wait for this tier or may still be read by its I/O."""
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready) + len(self.writing)

    def has_room(self, nbytes: int) -> bool:
        """Whether one more copy may be kept for this tier: always one, however large."""
        return not self.held_bytes or self.held_bytes + nbytes <= self._max_bytes

    def put(self, chunks: Iterable[Chunk]) -> None:
        """``chunks`` wait to be copied out of the engine."""
        for chunk in chunks:
            self.waiting[chunk] = None
            chunk.save.waiting.setdefault(chunk.index, {})[chunk.tier] = chunk

    def attach(self, chunk: Chunk, copy: Copy) -> None:
        """``chunk`` waits no longer: ``copy`` is kept for it until :meth:`remove`."""
        self._forget_waiting(chunk)
        chunk.copy = copy
        copy.users += 1
        self.held_bytes += copy.lease.buffer.nbytes
        self.ready[chunk] = None

    def take(self) -> Chunk:
        """The next one to write."""
        chunk, _ = self.ready.popitem(last=False)
        self.writing.add(chunk)
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """``chunk`` has ended; its copy is the caller's to give up."""
        if chunk in self.waiting:
            self._forget_waiting(chunk)
        self.ready.pop(chunk, None)
        self.writing.discard(chunk)

    def of(self, save: Save) -> list[Chunk]:
        """The chunks of one save that are not being written yet."""
        return [c for c in (*self.waiting, *self.ready) if c.save is save]

    def _forget_waiting(self, chunk: Chunk) -> None:
        del self.waiting[chunk]
        tiers = chunk.save.waiting[chunk.index]
        del tiers[chunk.tier]
        if not tiers:
            del chunk.save.waiting[chunk.index]

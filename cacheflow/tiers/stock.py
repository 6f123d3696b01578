"""What a tier knows of its backend, kept true: by what is stored, deleted, listed and missing.

Three kinds of doubt are written down rather than guessed about: objects that may have arrived (a
store that was cancelled or failed), objects that may have left (a delete that did), and entries
that the backend did not list. Doubtful bytes count as used.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cacheflow.tiers.changes import Changes
from cacheflow.tiers.entry import entry_of
from cacheflow.types import Evicted, StoreDropped, TierUsage, tell

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.tiers.catalogue import Catalogue, Leaving
    from cacheflow.tiers.changes import Look
    from cacheflow.tiers.entry import Entry
    from cacheflow.tiers.value import Value
    from cacheflow.types import ChunkInfo, ChunkKey, Event, Hold, ObjectKey, Observer

__all__ = ["Stock", "heard"]

T = TypeVar("T")
_CLOSE_SECONDS: Final = 5.0
_MOST_MISSED: Final = 16384
"""Misses that are remembered until they are stored, as a rule moments later."""


@dataclass(frozen=True, slots=True)
class _Doubt:
    """An object of which nobody knows whether it is there; decided once ``holds`` are idle."""

    nbytes: int
    tenant: bytes
    holds: tuple[Hold, ...]


class Stock:
    """The catalogue of one backend, and all that changes it. Belongs to one event loop."""

    def __init__(
        self,
        inner: StorageBackend,
        channel: str,
        catalogue: Catalogue,
        clock: Clock,
        observer: Observer,
        value: Value,
    ) -> None:
        self.inner = inner
        self.channel = channel
        self.catalogue = catalogue
        self.changes = Changes()
        self.clock = clock
        self.value = value
        self.leaving: set[ObjectKey] = set()
        """Being evicted."""
        self.suspects = 0
        """How often the backend did not list what the index has, since the last scan."""
        self._doubts: dict[ObjectKey, _Doubt] = {}
        self._missed: dict[ChunkKey, float] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._observer = observer

    # -- coming --------------------------------------------------------------------------------

    def arrived(self, info: ChunkInfo) -> Entry:
        """``info`` is in the backend now."""
        self._decided(info.key)
        entry = entry_of(info, self.clock.now())
        entry.worth = self.worth(entry)
        self.catalogue.put(entry, self._missed.pop(info.key.chunk, 1.0))
        return entry

    def missed(self, chunk: ChunkKey, evidence: float) -> None:
        """A lookup found nothing of ``chunk``: should it be stored, so much speaks for it."""
        self._missed.pop(chunk, None)
        if evidence < 1.0:
            self._missed[chunk] = evidence
            if len(self._missed) > _MOST_MISSED:
                del self._missed[next(iter(self._missed))]

    def evidence(self, chunk: ChunkKey) -> float:
        """What was said of ``chunk`` when it was missed; 1 if it was not."""
        return self._missed.get(chunk, 1.0)

    def worth(self, entry: Entry) -> float:
        """What one use of it saves, per byte, by what is known now."""
        return self.value.per_byte(entry.start, entry.stop, entry.cells, entry.nbytes)

    def doubt(
        self, key: ObjectKey, nbytes: int, tenant: bytes, holds: tuple[Hold, ...] = ()
    ) -> None:
        """Nobody knows whether the object is there; it counts as used meanwhile."""
        if (earlier := self._doubts.get(key)) is not None:
            nbytes, holds = max(nbytes, earlier.nbytes), (*earlier.holds, *holds)
        self._decided(key)
        self.catalogue.reserve(nbytes, tenant)
        self._doubts[key] = _Doubt(nbytes, tenant, holds)

    def listed(self, info: ChunkInfo, look: Look) -> Entry | None:
        """The backend has ``info``; None if that is no news any more and it is not known here."""
        entry = self.catalogue.find(info.key)
        if not look.is_news(info.key) or (entry is not None and entry.nbytes == info.nbytes):
            return entry
        if info.key in self._doubts and not self._is_idle(info.key):
            return entry
        if entry is None:
            self.catalogue.unknown = max(0, self.catalogue.unknown - info.nbytes)
        return self.arrived(info)

    # -- doubts --------------------------------------------------------------------------------

    @property
    def has_doubts(self) -> bool:
        """Whether there is anything to ask the backend about."""
        return bool(self._doubts)

    def decidable(self) -> list[ObjectKey]:
        """Doubtful objects on which nothing is in flight any more."""
        return [key for key in self._doubts if self._is_idle(key)]

    def decide(self, keys: Iterable[ObjectKey], infos: Sequence[ChunkInfo], look: Look) -> None:
        """The backend, asked about ``keys``, has ``infos``."""
        there = {info.key: info for info in infos}
        for key in keys:
            if key not in self._doubts or not look.is_news(key):
                continue
            if key in there:
                self.arrived(there[key])
            else:
                self._decided(key)

    def _is_idle(self, key: ObjectKey) -> bool:
        return not any(hold.in_flight for hold in self._doubts[key].holds)

    def _decided(self, key: ObjectKey) -> None:
        doubt = self._doubts.pop(key, None)
        if doubt is not None:
            self.catalogue.release(doubt.nbytes, doubt.tenant)

    # -- going ---------------------------------------------------------------------------------

    async def evict(self, leaving: Sequence[Leaving]) -> None:
        """Delete what left the catalogue; its bytes count as used until they are gone.

        Raises:
            BackendError: it could not be deleted; the backend will be asked what is there.
        """
        if not leaving:
            return
        keys = [entry.key for entry, _ in leaving]
        for entry, _ in leaving:
            self.doubt(entry.key, entry.nbytes, entry.tenant)
        self.leaving.update(keys)
        await self._to_the_end(self._evict(leaving, keys))

    async def delete(self, keys: Sequence[ObjectKey], reason: str = "deleted") -> list[bool]:
        """Delete whatever is there, at somebody's wish."""
        return await self._to_the_end(self._delete(keys, reason))

    async def deleted(self) -> None:
        """Wait for the deletes under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Give up deletes that still run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """A delete goes on when whoever wanted it is cancelled: nobody could tell what a half one
        has done, nor when it is over."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(heard)
        return await asyncio.shield(task)

    async def _evict(self, leaving: Sequence[Leaving], keys: Sequence[ObjectKey]) -> None:
        try:
            deleted = await self._delete_known(keys)
        finally:
            self.leaving.difference_update(keys)
        pairs = zip(leaving, deleted, strict=True)
        self._tell_left(
            (e, reason if was_there else "vanished") for (e, reason), was_there in pairs
        )

    async def _delete(self, keys: Sequence[ObjectKey], reason: str) -> list[bool]:
        before, deleted = [self.catalogue.find(key) for key in keys], None
        try:
            deleted = await self._delete_known(keys)
        finally:
            if deleted is None:
                self.suspects += len(keys)
        for key, entry, was_there in zip(keys, before, deleted, strict=True):
            if entry is not None and self.catalogue.find(key) is entry:
                self.gone(key, reason if was_there else "vanished")
        self.tell_usage()
        return deleted

    async def _delete_known(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Delete; whatever was in doubt about ``keys`` is known then, but for what was on its way
        in when the delete began: that may still arrive."""
        idle = [key for key in keys if key in self._doubts and self._is_idle(key)]
        with self.changes.deleting(keys) as change:
            try:
                deleted = await self.inner.delete(keys)
            finally:
                for key in filter(change.was_stored, keys):
                    self._unsure(key)
            for key in idle:
                if not change.was_stored(key):
                    self._decided(key)
        return deleted

    def _unsure(self, key: ObjectKey) -> None:
        """It was stored while it was being deleted: the backend knows which came first."""
        entry = self.catalogue.drop(key)
        if entry is not None:
            self.doubt(entry.key, entry.nbytes, entry.tenant)

    def gone(self, key: ObjectKey, reason: str) -> None:
        """The object was not there when somebody looked."""
        entry = self.catalogue.drop(key)
        if entry is not None:
            self._tell_left([(entry, reason)])

    def keep_only(self, found: set[ObjectKey], look: Look) -> None:
        """A whole scan found ``found``: what else the index has is gone."""
        lost = [e for e in self.catalogue if e.key not in found and look.is_news(e.key)]
        for entry in lost:
            self.gone(entry.key, "vanished")
        self.suspects = 0

    # -- telling -------------------------------------------------------------------------------

    def dropped(self, reason: str, objects: int, nbytes: int) -> None:
        """Objects were not taken."""
        self._tell(StoreDropped(self.channel, reason, objects, nbytes, self.clock.now()))

    def tell_usage(self) -> None:
        """After a change."""
        catalogue = self.catalogue
        capacity = catalogue.limits.capacity or 0
        now = self.clock.now()
        self._tell(TierUsage(self.channel, len(catalogue), catalogue.bytes, capacity, now))

    def _tell_left(self, left: Iterable[Leaving]) -> None:
        objects: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        chunks: defaultdict[str, set[bytes]] = defaultdict(set)
        for entry, reason in left:
            objects[reason] += 1
            nbytes[reason] += entry.nbytes
            chunks[reason].add(entry.key.chunk.digest)
        for reason, number in objects.items():
            now, keys = self.clock.now(), tuple(chunks[reason])
            self._tell(Evicted(self.channel, reason, number, nbytes[reason], now, keys))

    def _tell(self, event: Event) -> None:
        tell(self._observer, event)


def heard(task: asyncio.Future[Any]) -> None:
    """Whoever waited for it hears of its error; it may be nobody."""
    if not task.cancelled():
        task.exception()

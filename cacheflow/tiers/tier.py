"""A tier: any backend with an index, a capacity, leases, quotas and counts in front of it.

The backend stays the truth: lookups ask it, and the index learns from what it answers and from what
is stored and deleted through here. Evicts to make room, and never waits for any: while everything
is in use a store is dropped and counted. Interprets no payload.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

from cacheflow.abc import StorageBackend
from cacheflow.clock import SystemClock
from cacheflow.errors import BackendError, ClosedError
from cacheflow.registry import load_backend
from cacheflow.settings import TierSettings
from cacheflow.tiers.budget import Budget
from cacheflow.tiers.catalogue import Catalogue, Limits
from cacheflow.tiers.entry import Entry
from cacheflow.tiers.eviction import load_eviction
from cacheflow.tiers.keeper import Keeper
from cacheflow.tiers.stock import Stock
from cacheflow.tiers.storing import Storing
from cacheflow.tiers.value import FLAT
from cacheflow.types import Loan, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from cacheflow.clock import Clock
    from cacheflow.tiers.changes import Look
    from cacheflow.tiers.eviction.protocol import EvictionPolicy
    from cacheflow.tiers.value import Value
    from cacheflow.types import (
        Buffer,
        ChunkInfo,
        ChunkKey,
        Extent,
        ObjectKey,
        Observer,
        StorePart,
        TransferResult,
        Write,
    )

__all__ = ["Tier"]

_log = logging.getLogger(__name__)
_IN_ONE_GO: Final = 64
"""Chunks of a lookup that are dealt with before the event loop goes on: about 1 ms."""


class Tier(StorageBackend):
    """``inner`` under ``settings``. Made by :meth:`over`; closing it closes ``inner``.

    Events go to ``observer`` under the name of the tier. ``value`` says what objects are worth.
    """

    name: ClassVar[str] = "tier"

    def __init__(
        self,
        inner: StorageBackend,
        settings: TierSettings,
        *,
        clock: Clock | None = None,
        observer: Observer = lambda event: None,
        value: Value = FLAT,
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.settings = settings
        self.catalogue = Catalogue(lambda: _policy(settings), _limits(settings))
        self._clock = clock or SystemClock()
        self._stock = Stock(inner, settings.name, self.catalogue, self._clock, observer, value)
        self._keeper = Keeper(self._stock)
        self._storing = Storing(self._stock, self._keeper)
        self._loads = Budget(settings.load_operations, settings.load_bytes)
        self._stores = Budget(settings.store_operations, settings.store_bytes)
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """A tier with the fields of :class:`TierSettings` as options, its backend opened too."""
        settings = TierSettings(**cast("dict[str, Any]", options))
        kind = await asyncio.to_thread(load_backend, settings.backend)  # reads files
        return await cls.over(await kind.open(settings.options), settings)

    @classmethod
    async def over(
        cls,
        inner: StorageBackend,
        settings: TierSettings,
        *,
        clock: Clock | None = None,
        observer: Observer = lambda event: None,
        value: Value = FLAT,
    ) -> Self:
        """Take ``inner`` over; its index is rebuilt in the background, serving begins at once."""
        tier = cls(inner, settings, clock=clock, observer=observer, value=value)
        try:
            tier.catalogue.unknown = await inner.used_bytes()
        except Exception as error:  # a third party's backend may raise anything: it may get well
            _log.warning("tier %s: how full it is cannot be told: %s", settings.name, error)
        except BaseException:
            await inner.aclose()
            raise
        tier._keeper.start()
        return tier

    # -- the contract --------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """Leases what it finds for a while: eviction passes it over, as long as leases last."""
        return await self._list(keys, range(len(keys)), len(keys), self._use)

    async def survey(
        self, keys: Sequence[ChunkKey], wanted: Sequence[int]
    ) -> list[Sequence[ChunkInfo]]:
        """What a lookup has leased was used by it, moments ago; anything else is of a conversation
        that went on without being looked up, and that counts as its use. Leases what it finds: one
        part of a prompt does not make way for another."""

        found = [keys[place] for place in wanted]
        return await self._list(found, wanted, len(keys), self._refresh, is_saved=True)

    def declines(self, chunk: ChunkKey, start: int, stop: int, cells: int) -> bool:
        """By the policy, where something would be evicted. That is told as a dropped store."""
        self._check()
        catalogue, stock = self.catalogue, self._stock
        nbytes = catalogue.bytes // max(len(catalogue), 1)  # as the others: headers, codecs
        if not nbytes:
            return False
        worth = stock.value.per_byte(start, stop, cells, nbytes)
        if catalogue.admits(nbytes, worth, stock.evidence(chunk)):
            return False
        stock.dropped("worth", 1, nbytes)
        return True

    async def _list(
        self,
        keys: Sequence[ChunkKey],
        places: Sequence[int],
        chunks: int,
        use: Callable[[Entry, float, float], None],
        *,
        is_saved: bool = False,
    ) -> list[Sequence[ChunkInfo]]:
        """What there is of ``keys``, which are at ``places`` of a prompt of ``chunks``; ``use`` is
        called with what is found, the time, and how likely it would be loaded: of a restore that
        ends with the last chunk there is, unless the rest ``is_saved`` now."""
        self._check()
        asked = [key for key in keys if self._may_be_there(key)]
        with self._stock.changes.look() as look:
            found = await self.inner.lookup(asked) if asked else []
            if len(found) != len(asked):
                reason = f"{len(found)} answers to {len(asked)} keys"
                raise BackendError(reason, operation="lookup", context=self.settings.name)
            now, answers = self._clock.now(), dict(zip(asked, found, strict=True))
            self.catalogue.tick(now)
            there = [place for place, key in zip(places, keys, strict=True) if answers.get(key)]
            missed = self._stock.value.evidence(chunks)
            used = missed if is_saved else self._stock.value.evidence(max(there, default=-1) + 1)
            listed: list[Sequence[ChunkInfo]] = []
            for at, (key, place) in enumerate(zip(keys, places, strict=True), 1):
                if not at % _IN_ONE_GO:
                    await asyncio.sleep(0)
                answer = answers.get(key, ())
                if not answer:
                    self._stock.missed(key, missed[place])
                self._suspect(key, answer)
                infos = [info for info in answer if self._is_current(info, now)]
                for info in infos:
                    if (entry := self._stock.listed(info, look)) is not None:
                        use(entry, now, used[place])
                listed.append(infos)
        return listed

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        """In the budget for loads; what is being read is not evicted."""
        self._check()
        with ExitStack() as held:
            look = held.enter_context(self._stock.changes.look())
            for read in reads:  # before the first await; the inner backend starts later
                read.buffer.hold.acquire()
                held.callback(read.buffer.hold.release)
                if (entry := self.catalogue.find(read.key)) is not None:
                    self.catalogue.holds.begin_read(entry)
                    held.callback(self.catalogue.holds.end_read, entry)
            for piece in self._loads.pieces(reads, lambda read: read.buffer.nbytes):
                nbytes = sum(read.buffer.nbytes for read in piece)
                async with (
                    self._loads.taken(len(piece), nbytes),
                    aclosing(self.inner.load(piece)) as results,
                ):
                    async for result in results:
                        if result.status is TransferStatus.MISSING:
                            self._missed(_key(result), look)
                        yield result

    def borrow(self, extents: Sequence[Extent]) -> Loan | None:
        """What is lent is not evicted. Nothing is moved, so the budget for loads is not asked."""
        self._check()
        loan = self.inner.borrow(extents)
        if loan is None:
            return None
        entries: list[Entry] = []

        def give_back() -> None:
            self._end_reads(entries)
            loan.release()

        try:
            for part in loan.parts:
                if part.status is TransferStatus.MISSING:
                    with self._stock.changes.look() as look:  # nothing was awaited
                        self._missed(part.extent.key, look)
                elif (entry := self.catalogue.find(part.extent.key)) is not None:
                    self.catalogue.holds.begin_read(entry)
                    entries.append(entry)
        except BaseException:
            give_back()
            raise
        return Loan(loan.parts, give_back)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """Evicts what has to go first. What there is no room for is FULL, at once."""
        self._check()
        results: list[TransferResult] = []
        with ExitStack() as held:
            for write in writes:
                for part in write.parts:
                    part.hold.acquire()
                    held.callback(part.hold.release)
            for piece in self._stores.pieces(writes, lambda write: write.nbytes):
                async with self._stores.taken(len(piece), sum(write.nbytes for write in piece)):
                    self._check()
                    results += await self._storing.store(piece)
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Goes on to its end if it is cancelled."""
        self._check()
        return await self._stock.delete(keys)

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        async with aclosing(self.inner.scan()) as infos:
            async for info in infos:
                yield info

    async def used_bytes(self) -> int:
        self._check()
        return await self.inner.used_bytes()

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        """What was read of these is wrong: they are deleted, to be stored anew."""
        self.inner.distrust(keys)
        self._keeper.distrust(keys)

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self.inner.register_memory(memory)

    def parts(self) -> Sequence[StorePart]:
        return self.inner.parts()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._keeper.aclose()
            await self._stock.aclose()
            await self.inner.aclose()

    # -- beyond it -----------------------------------------------------------------------------

    def hint(self, keys: Sequence[ChunkKey], priority: float, ttl: float) -> None:
        """For ``ttl`` seconds these chunks count ``priority`` times what they seem worth; fading.

        More than 1 keeps them longer, less lets them go sooner. A hint never prevents eviction.
        """
        self._check()
        if not (priority > 0.0 and ttl > 0.0):
            raise ValueError(f"priority {priority} and ttl {ttl} must be positive")
        for entry in self._entries(keys):
            self._keeper.hint(entry, priority, ttl)

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Let these chunks leave last for ``ttl`` seconds; returns how many bytes are pinned so.

        What is over the tenant's budget (``pin_bytes``) is not pinned. A pin is broken, and that is
        counted, where nothing else is left to make room with.
        """
        self._check()
        until = self._clock.now() + ttl
        entries = [entry for entry in self._entries(keys) if self.catalogue.pin(entry, until)]
        return sum(entry.nbytes for entry in entries)

    async def settle(self) -> None:
        """Do now what otherwise happens in the background: whatever is in doubt is asked about, the
        expired goes. Afterwards the index has what the backend has.

        Raises:
            BackendError: the backend cannot be asked.
        """
        self._check()
        await self._keeper.settle()

    # -- inside --------------------------------------------------------------------------------

    def _entries(self, keys: Sequence[ChunkKey]) -> list[Entry]:
        return [entry for key in keys for entry in self.catalogue.of(key)]

    def _may_be_there(self, key: ChunkKey) -> bool:
        """Of a store that nobody else writes to, the whole index says what is not there."""
        is_certain = self._keeper.scanned and not self.capabilities.shared
        return not is_certain or self._stock.has_doubts or bool(self.catalogue.of(key))

    def _is_current(self, info: ChunkInfo, now: float) -> bool:
        if self._stock.leaving and info.key in self._stock.leaving:
            return False
        entry = self.catalogue.find(info.key)
        return entry is None or not self.catalogue.is_expired(entry, now)

    def _use(self, entry: Entry, now: float, chance: float) -> None:
        entry.worth = self._stock.worth(entry)
        self.catalogue.touch(entry, now, chance)
        self.catalogue.holds.lease(entry, now + self.settings.lease_seconds)

    def _refresh(self, entry: Entry, now: float, chance: float) -> None:
        if entry in self.catalogue.holds:
            self.catalogue.holds.lease(entry, now + self.settings.lease_seconds)
        else:
            self._use(entry, now, chance)

    def _suspect(self, key: ChunkKey, infos: Sequence[ChunkInfo]) -> None:
        """The backend did not list what the index has: others deleted it, or it is damaged, or set
        aside. Eviction or the next scan will tell."""
        missing = len(self.catalogue.of(key)) - len(infos)
        if missing > 0:
            self._stock.suspects += missing
            self._keeper.kick()

    def _end_reads(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.catalogue.holds.end_read(entry)

    def _missed(self, key: ObjectKey, look: Look) -> None:
        """A read found nothing: then there is nothing, unless it was stored meanwhile."""
        if look.is_news(key):
            self._stock.gone(key, "vanished")

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.settings.name} is closed")


def _key(result: TransferResult) -> ObjectKey:
    request = result.request
    return request.key if isinstance(request, Read) else request.info.key


def _policy(settings: TierSettings) -> EvictionPolicy[Entry]:
    return load_eviction(settings.eviction, Entry)


def _limits(settings: TierSettings) -> Limits:
    return Limits(
        capacity=settings.capacity_bytes,
        quota=settings.tenant_quota_bytes,
        pin_bytes=settings.pin_bytes,
        ttl=settings.ttl,
    )

"""What the store has, and what its clients may do with it: the operations behind the frames.

Knows no sockets: a client is a name. Everything belongs to one event loop; hashing and disk are
done elsewhere and awaited here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv import checksum, decode_header, encode_header
from cacheflow.pool.grants import Grants
from cacheflow.pool.slots import Arrival
from cacheflow.types import ChecksumKind, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.clock import Clock
    from cacheflow.pool.slots import Arena, Slot
    from cacheflow.pool.spill import Spill
    from cacheflow.tiers import Tier
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, TransferResult

__all__ = ["Directory", "Terms"]

_log = logging.getLogger(__name__)
_LEAST_WAIT: Final = 0.05
"""Seconds between two looks at what has ended."""
_UNCOMMITTED_SHARE: Final = 0.5
"""Of the arena: what slots that nobody has committed may take."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds: how long a lease lasts, and how long a slot may wait to be committed."""

    lease: float = 10.0
    fill: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    """A slot on its way in: the store that waits for it in the tier."""

    arrival: Arrival
    storing: asyncio.Task[list[TransferResult]]


class Directory:
    """``overdue`` is told the names of clients that did not commit in time."""

    def __init__(
        self,
        arena: Arena,
        tier: Tier,
        spill: Spill | None,
        clock: Clock,
        terms: Terms,
        *,
        busy: Callable[[int], None] = lambda grants: None,
        overdue: Callable[[str], None] = lambda client: None,
    ) -> None:
        self.arena = arena
        self.tier = tier
        self.spill = spill
        self.terms = terms
        self.grants = Grants(busy, self._lease_over)
        self.is_draining = False
        self.counts: defaultdict[str, int] = defaultdict(int)
        """What happened, for metrics: by name."""
        self._clock = clock
        self._overdue = overdue
        self._reads: dict[int, Any] = {}
        """The tier's entry of every leased slot, by generation, and how many clients lease it."""
        self._filling: dict[int, _Filling] = {}
        self._opening = 0
        """Bytes of slots that are being opened for clients."""
        self._promoting: dict[ObjectKey, asyncio.Task[None]] = {}
        self._unwanted: set[ObjectKey] = set()
        """Of these: deleted since the reading began."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    # -- reading -------------------------------------------------------------------------------

    async def lookup(
        self, chunks: Sequence[ChunkKey], client: str | None = None
    ) -> list[list[tuple[Slot | None, ChunkInfo]]]:
        """All objects of each chunk; the slot is None while it is on disk only. ``client`` may read
        these slots from now on, without asking again. Nothing is found while the store drains."""
        if self.is_draining:
            return [[] for _ in chunks]
        in_memory = await self.tier.lookup(chunks)
        on_disk = await self.spill.lookup(chunks) if self.spill is not None else {}
        found = []
        for chunk, infos in zip(chunks, in_memory, strict=True):
            here = [(slot, info) for info in infos if (slot := self.arena.find(info.key))]
            there = [(None, info) for info in on_disk.get(chunk, ())]
            found.append([*here, *there])
            for _, info in here if client is not None else ():
                self._leased(client or "", info.key, looked_up=True)
        self._set_timer()
        self.counts["lookup_chunks"] += len(chunks)
        self.counts["lookup_hits"] += sum(map(bool, found))
        return found

    async def lease(self, client: str, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        """Slots that ``client`` may read from now on; what is on disk only is read in first. While
        the store drains nothing is leased."""
        if self.is_draining:
            return [None for _ in keys]
        slots = [self._leased(client, key) for key in keys]
        missing = {key for key, slot in zip(keys, slots, strict=True) if slot is None}
        if missing and self.spill is not None:
            await asyncio.gather(*map(self._promote, missing))
            slots = [
                slot or self._leased(client, key) for key, slot in zip(keys, slots, strict=True)
            ]
        self._set_timer()
        self.counts["leases"] += sum(slot is not None for slot in slots)
        return slots

    def release(self, client: str, generations: Sequence[int], *, looked_up: bool = False) -> None:
        """One lease of each is not needed any more, or that of lookups."""
        for generation in generations:
            self.grants.release(client, generation, looked_up=looked_up)

    def _leased(self, client: str, key: ObjectKey, *, looked_up: bool = False) -> Slot | None:
        slot = self.arena.find(key)
        until = self._clock.now() + self.terms.lease
        if slot is not None and self.grants.lease(client, slot, until, looked_up=looked_up):
            entry, users = self._reads.get(slot.generation, (self.tier.catalogue.find(key), 0))
            if not users and entry is not None:
                self.tier.catalogue.holds.begin_read(entry)
            self._reads[slot.generation] = (entry, users + 1)
        return slot

    def _lease_over(self, slot: Slot) -> None:
        entry, users = self._reads.pop(slot.generation)
        if users > 1:
            self._reads[slot.generation] = (entry, users - 1)
        elif entry is not None:
            self.tier.catalogue.holds.end_read(entry)

    async def _promote(self, key: ObjectKey) -> None:
        """Read an object in from disk; all who want it at the same time wait for the same read."""
        task = self._promoting.get(key)
        if task is None:
            task = self._promoting[key] = asyncio.create_task(self._read_in(key))
            task.add_done_callback(lambda ended: self._promoted(key, ended))
        await asyncio.shield(task)

    def _promoted(self, key: ObjectKey, task: asyncio.Task[None]) -> None:
        del self._promoting[key]
        self._unwanted.discard(key)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("reading %r in from disk failed", key, exc_info=error)

    async def _read_in(self, key: ObjectKey) -> None:
        assert self.spill is not None
        found = await self.spill.lookup([key.chunk])
        info = next((info for info in found.get(key.chunk, ()) if info.key == key), None)
        if info is None:
            return
        filling = await self._open(info)
        if not isinstance(filling, _Filling):
            return
        slot = filling.arrival.opened.result()
        try:
            is_there = await self.spill.read(info, slot)
        except BaseException:
            filling.arrival.filled.cancel()
            raise
        slot.is_kept = True
        is_there = is_there and key not in self._unwanted
        filling.arrival.filled.set_result(is_there)
        await filling.storing
        if key in self._unwanted:
            await self.tier.delete([key])
        self.counts["read_in"] += is_there

    # -- writing -------------------------------------------------------------------------------

    async def alloc(self, client: str, headers: Sequence[bytes]) -> list[Slot | str]:
        """A slot for each object, or why there is none."""
        if self.is_draining:
            return ["draining" for _ in headers]
        infos = await asyncio.to_thread(lambda: [_info(header) for header in headers])
        return list(await asyncio.gather(*(self._alloc(client, info) for info in infos)))

    async def _alloc(self, client: str, info: ChunkInfo | str) -> Slot | str:
        if isinstance(info, str):
            return info
        most = int(self.arena.memory.nbytes * _UNCOMMITTED_SHARE)
        coming = self.grants.uncommitted_bytes + self._opening
        if coming and coming + info.nbytes > most:
            return "busy: too much is being written"
        self._opening += info.nbytes
        try:
            filling = await self._open(info)
        finally:
            self._opening -= info.nbytes
        if isinstance(filling, str):
            self.counts["refused"] += 1
            return filling
        slot = filling.arrival.opened.result()
        self._filling[slot.generation] = filling
        self.grants.to_fill(client, slot, self._clock.now() + self.terms.fill)
        self._set_timer()
        return slot

    async def _open(self, info: ChunkInfo) -> _Filling | str:
        """Room for an object in the tier, which evicts for it; or why there is none."""
        loop = asyncio.get_running_loop()
        arrival = Arrival(info, (), loop.create_future(), loop.create_future())
        storing = asyncio.create_task(self.tier.store([arrival]))
        try:
            ways: list[asyncio.Future[Any]] = [storing, arrival.opened]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            storing.cancel()
            raise
        if arrival.opened.done():
            return _Filling(arrival, storing)
        [result] = await storing
        return f"full: {result.error}"[:1000]

    async def commit(self, client: str, slots: Sequence[tuple[int, int]]) -> list[str]:
        """Make these objects visible; why each is refused, or nothing."""
        return list(await asyncio.gather(*(self._commit(client, *slot) for slot in slots)))

    async def _commit(self, client: str, generation: int, expected: int) -> str:
        slot = self.grants.filled(client, generation)
        filling = self._filling.pop(generation, None)
        if slot is None or filling is None:
            return "no such slot is to be filled: was it taken back?"
        filled, refused = filling.arrival.filled, ""
        try:
            if slot.hold.in_flight:
                refused = "it is still being written"
            elif not await asyncio.to_thread(_is_whole, slot, expected):
                refused = "its bytes are not those that were to be sent"
        except BaseException:
            filled.cancel()
            raise
        if not filled.done():
            filled.set_result(not refused)
        [result] = await filling.storing
        if refused or result.status is not TransferStatus.OK:
            self.counts["refused"] += 1
            return refused or str(result.error)
        self.counts["commits"] += 1
        if self.spill is not None:
            self.spill.put(slot)
        return ""

    def abort(self, client: str, generations: Sequence[int]) -> None:
        """These will not be committed, and ``client`` writes to them no more."""
        for generation in generations:
            if self.grants.filled(client, generation) is not None:
                self._give_up(generation)

    def dismiss(self, client: str) -> None:
        """``client`` is gone, and its transport touches the arena no more."""
        for slot in self.grants.dismiss(client):
            self._give_up(slot.generation)
        self._set_timer()

    def _give_up(self, generation: int) -> None:
        filling = self._filling.pop(generation, None)
        if filling is not None and not filling.arrival.filled.done():
            filling.arrival.filled.set_result(False)
            self.counts["aborted"] += 1

    # -- the rest ------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """From memory and from disk."""
        self._unwanted.update(key for key in keys if key in self._promoting)
        for key in keys:
            if (slot := self.arena.find(key)) is not None:
                slot.is_deleted = True
        deleted = await self.tier.delete(keys)
        if self.spill is None:
            return deleted
        on_disk = await self.spill.tier.delete(keys)
        return [a or b for a, b in zip(deleted, on_disk, strict=True)]

    async def headers(self) -> list[tuple[ObjectKey, bytes | None]]:
        """Every object; with the header of those that are on disk only."""
        found: list[tuple[ObjectKey, bytes | None]]
        found = [(slot.info.key, None) for slot in self.arena.slots()]
        if self.spill is not None:
            async for info in self.spill.scan():
                found.append((info.key, encode_header(info)))
        return found

    @property
    def used_bytes(self) -> int:
        """Of all objects, wherever they are."""
        return self.tier.catalogue.bytes + (self.spill.bytes_beyond if self.spill else 0)

    @property
    def objects(self) -> int:
        """How many there are in memory."""
        return len(self.arena)

    async def aclose(self) -> None:
        """End what is under way. The arena and the disk are closed by whoever opened them."""
        if self._timer is not None:
            self._timer.cancel()
        tasks: list[asyncio.Task[Any]] = [*self._promoting.values()]
        for filling in self._filling.values():
            if not filling.arrival.filled.done():
                filling.arrival.filled.set_result(False)
            tasks.append(filling.storing)
        for task in self._promoting.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    # -- time ----------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Wake when the first grant ends; an idle store has no timer."""
        end = self.grants.next_end()
        if end is None or (self._timer is not None and end >= self._due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = end
        delay = max(end - self._clock.now(), 0.0) + _LEAST_WAIT
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.now()
        before = self.grants.leases
        late = self.grants.expired(now)
        self.counts["leases_expired"] += before - self.grants.leases
        for client in dict.fromkeys(grant.client for grant in late):
            self._overdue(client)
        self._set_timer()


def _info(header: bytes) -> ChunkInfo | str:
    try:
        return decode_header(header)
    except IntegrityError as error:
        return f"bad header: {error}"[:1000]


def _is_whole(slot: Slot, expected: int) -> bool:
    """Whether the bytes are those that the client says it sent, and begin with the header."""
    view = slot.lease.view
    if checksum(ChecksumKind.XXH3, view) != expected:
        return False
    try:
        return decode_header(view, expect=slot.info.key) == slot.info
    except IntegrityError:
        return False

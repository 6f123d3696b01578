"""The arena as a storage backend: objects lie in slots whose bytes come from elsewhere.

What is stored here is written into its slot by a client or read into it from disk, so a store
hands out the slot first and waits until it is filled. A slot's bytes never change once its object
is visible; what is replaced or deleted keeps its memory until nobody touches it any more. Knows no
clients, no leases and no order of eviction: :class:`cacheflow.tiers.Tier` in front of it does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError, CapacityError, ConfigError
from cacheflow.memory import Lease, StagingPool
from cacheflow.types import Buffer, Capabilities, TransferResult, TransferStatus, Write

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from cacheflow.memory import InFlight
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read

__all__ = ["Arena", "Arrival", "Slot"]


@dataclass(slots=True, eq=False)
class Slot:
    """Room of one object. ``hold`` counts everything that may still touch the bytes."""

    generation: int
    """Never given to another slot of this arena."""
    info: ChunkInfo
    lease: Lease
    offset: int
    """From the start of the arena."""
    is_kept: bool = False
    """The same object is on disk."""
    is_deleted: bool = False
    """At somebody's wish: it must not reach the disk any more."""

    @property
    def hold(self) -> InFlight:
        return self.lease.hold

    @property
    def header(self) -> bytes:
        """As it lies in the slot."""
        return bytes(self.lease.view[: self.info.payload_offset])

    def parts(self) -> tuple[Buffer, Buffer]:
        """Header and payload."""
        start = self.info.payload_offset
        return self.lease.part(0, start), self.lease.part(start, self.info.nbytes - start)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival(Write):
    """An object whose bytes come later: ``opened`` gets its slot, ``filled`` is whether they came
    (the owner sets it; a cancelled one means no)."""

    opened: asyncio.Future[Slot]
    filled: asyncio.Future[bool]


class Arena(StorageBackend):
    """``capacity`` bytes in huge pages, where there are any."""

    name: ClassVar[str] = "arena"

    def __init__(self, capacity: int) -> None:
        self.capabilities = Capabilities()
        self._pool = StagingPool(capacity, pin=False, huge=True)
        self.memory = Buffer(
            self._pool.address, self._pool.capacity, self._pool.kind, self._pool.view, _NoHold()
        )
        self._objects: dict[ChunkKey, dict[ObjectKey, Slot]] = {}
        self._generations: dict[int, Slot] = {}
        self._next = count(1)
        self._used = 0

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """There is nothing to open by name: a store makes one."""
        raise ConfigError("an arena is made by Arena(capacity)")

    @property
    def pages(self) -> str:
        """``hugetlb``, ``advised`` or ``normal``."""
        return self._pool.pages

    def find(self, key: ObjectKey) -> Slot | None:
        """Where the object is."""
        return self._objects.get(key.chunk, {}).get(key)

    def slots(self) -> Iterator[Slot]:
        """All visible objects; do not let the loop go meanwhile."""
        return iter(self._generations.values())

    def __len__(self) -> int:
        return len(self._generations)

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        return [[slot.info for slot in self._objects.get(key, {}).values()] for key in keys]

    def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        """Slots are leased and read where they are."""
        raise BackendError("slots are leased, not loaded", operation="load", context=self.name)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """Arrivals only. REFUSED: its bytes never came."""
        return [await self._store(write) for write in writes]

    async def _store(self, write: Write) -> TransferResult:
        if not isinstance(write, Arrival):
            raise TypeError("an arena stores arrivals")
        start, info = time.monotonic(), write.info
        lease = self._room_for(info.nbytes)
        if not isinstance(lease, Lease):
            return TransferResult(write, TransferStatus.FULL, 0, 0.0, lease)
        slot = Slot(next(self._next), info, lease, lease.buffer.address - self.memory.address)
        try:
            write.opened.set_result(slot)
            is_filled = await write.filled
        except BaseException:
            lease.release()
            raise
        seconds = time.monotonic() - start
        if not is_filled:
            lease.release()
            error = BackendError("its bytes never came", operation="store", context=str(info.key))
            return TransferResult(write, TransferStatus.REFUSED, 0, seconds, error)
        self._put(slot)
        return TransferResult(write, TransferStatus.OK, info.nbytes, seconds)

    def _room_for(self, nbytes: int) -> Lease | CapacityError:
        try:
            lease = self._pool.try_lease(nbytes)
        except CapacityError as error:
            return error
        reason = f"no room for {nbytes} bytes: {self._pool.free_bytes} are free, in pieces"
        return lease or CapacityError(reason)

    def _put(self, slot: Slot) -> None:
        key = slot.info.key
        self._remove(key)
        self._objects.setdefault(key.chunk, {})[key] = slot
        self._generations[slot.generation] = slot
        self._used += slot.info.nbytes

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [self._remove(key) for key in keys]

    def _remove(self, key: ObjectKey) -> bool:
        slot = self._objects.get(key.chunk, {}).pop(key, None)
        if slot is None:
            return False
        if not self._objects[key.chunk]:
            del self._objects[key.chunk]
        del self._generations[slot.generation]
        self._used -= slot.info.nbytes
        slot.lease.release()
        return True

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        for slot in list(self.slots()):
            yield slot.info

    async def used_bytes(self) -> int:
        return self._used

    async def aclose(self) -> None:
        for slot in list(self.slots()):
            self._remove(slot.info.key)
        await self._pool.aclose()


class _NoHold:
    """Of the arena as a whole, which lasts as long as the store."""

    in_flight = 0

    def acquire(self) -> None:
        """Nothing to count."""

    def release(self) -> None:
        """Nothing to count."""

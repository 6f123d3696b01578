"""A backend for tests of tiers: it can be full, hang, fail and be changed behind their back."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cacheflow.clock import ManualClock
from cacheflow.errors import BackendError, CapacityError
from cacheflow.settings import TierSettings
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.tier import Tier
from cacheflow.types import (
    Evicted,
    ObjectKey,
    StoreDropped,
    TierUsage,
    TransferResult,
    TransferStatus,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from cacheflow.types import ChunkInfo, Event

SIZE: Final = make_object(1).info.nbytes


class Shelf(MemoryBackend):
    """``room``: objects it takes. ``gates``: operations of these names wait until they are set."""

    def __init__(self, room: int = 1000, *, shared: bool = False) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, shared=shared)
        self.room = room
        self.broken: set[str] = set()
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(_open_gate)
        self.calls: Counter[str] = Counter()
        self.peak = 0

    async def _enter(self, operation: str) -> None:
        self.calls[operation] += 1
        await self.gates[operation].wait()
        if operation in self.broken:
            raise BackendError(f"broken at call {self.calls[operation]}", operation=operation)

    async def lookup(self, keys: Sequence[Any]) -> list[Sequence[ChunkInfo]]:
        await self._enter("lookup")
        return await super().lookup(keys)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        await self._enter("store")
        results = []
        for write in writes:
            is_new = write.info.key not in self.objects
            if is_new and len(self.objects) >= self.room:
                error = CapacityError("full")
                results.append(TransferResult(write, TransferStatus.FULL, 0, 0.0, error))
            else:
                results += await super().store([write])
                await asyncio.sleep(0)  # so that a batch may be cancelled half way
        self.peak = max(self.peak, len(self.objects))
        return results

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        await self._enter("delete")
        answers = []
        for key in keys:
            answers += await super().delete([key])
            await asyncio.sleep(0)
        return answers

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        await self._enter("scan")
        async for info in super().scan():
            await asyncio.sleep(0)
            yield info


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


class Rig:
    """A tier over a shelf, in time that stands still unless told otherwise."""

    def __init__(self, shelf: Shelf, settings: TierSettings) -> None:
        self.shelf = shelf
        self.settings = settings
        self.clock = ManualClock(100.0)
        self.events: list[Event] = []
        self.left: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.usage = TierUsage("t", 0, 0, 0, 0.0)
        self.tier: Tier = None  # type: ignore[assignment]  # set when it is opened

    def observe(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Evicted):
            self.left[event.reason] += event.objects
        elif isinstance(event, StoreDropped):
            self.dropped[event.reason] += event.objects
        elif isinstance(event, TierUsage):
            self.usage = event

    async def store(self, *numbers: int, tenant: bytes = bytes(16)) -> list[TransferStatus]:
        writes = []
        for number in numbers:
            write = make_object(number).write()
            writes.append(Write(replace(write.info, tenant_id=tenant), write.parts))
        return [result.status for result in await self.tier.store(writes)]

    async def found(self, *numbers: int) -> list[int]:
        answers = await self.tier.lookup([make_object(number).key.chunk for number in numbers])
        return [number for number, infos in zip(numbers, answers, strict=True) if infos]

    async def assert_exact(self) -> None:
        """After settling the index is what the backend has, to the byte, and nothing is open."""
        await self.tier.settle()
        catalogue = self.tier.catalogue
        assert {entry.key for entry in catalogue} == set(self.shelf.objects)
        assert catalogue.bytes == catalogue.used == await self.shelf.used_bytes()
        assert self.usage.used_bytes == catalogue.bytes

    @property
    def there(self) -> list[int]:
        """Numbers of the objects in the backend."""
        return sorted(n for n in range(200) if make_object(n).key in self.shelf.objects)


@asynccontextmanager
async def rig(
    shelf: Shelf | None = None, *, objects: int | None = None, scanned: bool = True, **fields: Any
) -> AsyncIterator[Rig]:
    """``objects``: the tier's capacity; ``fields``: of the settings, unchecked."""
    settings = TierSettings(name="t", backend="memory")
    capacity = None if objects is None else objects * SIZE
    it = Rig(shelf or Shelf(), settings.model_copy(update={"capacity_bytes": capacity, **fields}))
    it.tier = await Tier.over(it.shelf, it.settings, clock=it.clock, observer=it.observe)
    try:
        if scanned:
            await it.tier.settle()
        yield it
    finally:
        await it.tier.aclose()

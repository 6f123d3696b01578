"""A guarded tier over a store that can be made to go wrong, and what it told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from cacheflow.clock import SystemClock
from cacheflow.testing.faults import Fault, FaultyBackend
from cacheflow.testing.objects import StoredObject, aligned_buffer, make_object
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.types import Read, TierDown, TierUp, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.memory import InFlight
    from cacheflow.types import Event, TransferResult

OBJECTS: Final = [make_object(number) for number in range(6)]
KEYS: Final = [each.key.chunk for each in OBJECTS]
QUICK: Final = HealthLimits(failures=3, first_wait=0.01, longest_wait=0.05)


class Rig:
    """The stack, from the inside out, with all that is to be seen of it."""

    def __init__(self, deadline: float, limits: HealthLimits) -> None:
        self.store = MemoryBackend()
        self.faulty = FaultyBackend(self.store)
        self.events: list[Event] = []
        self.told = asyncio.Event()
        self.tier = Guarded(
            self.faulty, "disk", deadline=deadline, limits=limits, observer=self._tell
        )

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.told.set()

    async def until(self, kind: type[TierDown | TierUp], direction: str = "load") -> Any:
        """The next event of ``kind`` that was not asked for yet."""
        async with asyncio.timeout(10):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and event.direction == direction:
                        self.events.remove(event)
                        return event
                self.told.clear()
                await self.told.wait()

    async def until_a_write_may_probe(self) -> None:
        """The wait is over by the tier's own clock: a timer of the loop may end a moment early."""
        clock = SystemClock()
        # Nothing but time ends this wait.
        while (left := self.tier.writing.retry_at - clock.now()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)

    async def load(
        self, objects: Sequence[StoredObject] = OBJECTS, hold: InFlight | None = None
    ) -> list[TransferResult]:
        """All objects, whole."""
        return [result async for result in self.tier.load(reads_of(objects, hold))]

    async def found(self) -> int:
        """How many of the objects a lookup lists."""
        return sum(bool(infos) for infos in await self.tier.lookup(KEYS))

    async def set_aside(self, *faults: Fault) -> None:
        """Make it fall sick of ``faults``."""
        self.faulty.inject(*faults)
        await self.load_until_sick()
        await self.until(TierDown)

    async def load_until_sick(self) -> None:
        """At most three times."""
        for _ in range(3):
            if self.tier.reading.well:
                await asyncio.gather(self.load(), return_exceptions=True)


def reads_of(objects: Sequence[StoredObject], hold: InFlight | None = None) -> list[Read]:
    return [Read(each.key, 0, aligned_buffer(len(each.data), hold)) for each in objects]


def statuses(results: Sequence[TransferResult]) -> set[TransferStatus]:
    return {result.status for result in results}


@asynccontextmanager
async def rig(deadline: float = 5.0, limits: HealthLimits = QUICK) -> AsyncIterator[Rig]:
    """Filled, and closed at the end without leaving a task."""
    tasks = asyncio.all_tasks()
    made = Rig(deadline, limits)
    await made.tier.store([each.write() for each in OBJECTS])
    yield made
    made.faulty.heal()
    await made.tier.aclose()
    assert asyncio.all_tasks() == tasks

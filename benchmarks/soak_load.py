"""The load of ``bench_soak``: workers over two tiers over their caps that fail now and then.

Each looks up the chunks of some conversation, reads what is there (into leased staging memory,
verified), stores what is not, sometimes deletes, or gives up half way. What they did and saw is
written into a ledger, as is what the process held meanwhile; judging it is the benchmark's.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import BackendError, IntegrityError
from cacheflow.kv import decode_header, encode_header, verify
from cacheflow.memory import StagingPool
from cacheflow.registry import load_backend
from cacheflow.settings import TierSettings
from cacheflow.testing.faults import Fault, FaultKind, FaultyBackend
from cacheflow.testing.objects import StoredObject, make_object
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.tiers.tier import Tier
from cacheflow.types import Evicted, Read, Span, TierUsage, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AsyncExitStack

    from cacheflow.types import Event, ObjectKey, TransferResult

__all__ = ["CAPS", "STAGING", "TENANTS", "WORKERS", "Soak"]

TENANTS: Final = 4
CONVERSATIONS: Final = 40
"""A tenant."""
CHUNKS: Final = 8
"""A conversation."""
WORKERS: Final = 8
CAPS: Final = {"dram": 8 << 20, "nvme": 16 << 20}
"""Of the 36 MB that there are."""
QUOTA: Final = 6 << 20
STAGING: Final = 4 << 20
FAULTS: Final = (
    Fault(FaultKind.EIO, "load", rate=0.001),
    Fault(FaultKind.FLIP, "load", rate=0.001),
    Fault(FaultKind.SHORT, "load", rate=0.001),
    Fault(FaultKind.EIO, "store", rate=0.001),
    Fault(FaultKind.SLOW, "*", rate=0.0005, seconds=0.02),
    Fault(FaultKind.RAISE, "load", rate=0.0005),
)
SAMPLES: Final = 30


def objects_of(tenant: int) -> list[StoredObject]:
    """Every chunk of every conversation of one tenant."""
    made = []
    for number in range(CONVERSATIONS * CHUNKS):
        base = make_object(tenant * 10_000 + number)
        info = replace(base.info, tenant_id=bytes([tenant + 1]) * 16, payload_offset=0, nbytes=0)
        header = encode_header(info)
        made.append(StoredObject(decode_header(header), header, base.payload))
    return made


@dataclass(slots=True)
class Sample:
    """What the process holds at some moment."""

    operations: int
    rss: int
    files: int
    leased: int
    quarantined: int


@dataclass(slots=True)
class Ledger:
    """What the workers did and saw; operations are keys, reads, writes and deletes."""

    asked: int = 0
    found: int = 0
    missed: int = 0
    reads: int = 0
    stores: int = 0
    deletes: int = 0
    given_up: int = 0
    read_as: Counter[str] = field(default_factory=Counter)
    stored_as: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    usage: dict[str, TierUsage] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def operations(self) -> int:
        return self.asked + self.reads + self.stores + self.deletes

    def hear(self, event: Event) -> None:
        """An observer."""
        if isinstance(event, Evicted):
            self.evicted[event.channel] += event.objects
        elif isinstance(event, TierUsage):
            self.usage[event.channel] = event


class Soak:
    """The tiers, the staging pool and the workers."""

    def __init__(self, seed: int) -> None:
        self.ledger = Ledger()
        self.pool = StagingPool(STAGING)
        self.faulty: dict[str, FaultyBackend] = {}
        self.tiers: dict[str, Tier] = {}
        self._objects = [objects_of(tenant) for tenant in range(TENANTS)]
        self._seed = seed
        self._storing: set[tuple[str, ObjectKey]] = set()

    async def open(self, folder: Path, stack: AsyncExitStack) -> None:
        """Both tiers, closed with ``stack``."""
        options: dict[str, dict[str, object]] = {
            "dram": {"capacity_bytes": 2 * CAPS["dram"]},
            "nvme": {"path": str(folder / "nvme"), "fsync": False},
        }
        for name, settings in options.items():
            kind = await asyncio.to_thread(load_backend, name)
            faulty = FaultyBackend(await kind.open(settings), FAULTS, seed=self._seed)
            limits = HealthLimits(first_wait=0.05, longest_wait=0.2)
            guarded = Guarded(faulty, name, limits=limits)
            tier_settings = TierSettings.model_validate(
                {
                    "name": name,
                    "backend": name,
                    "capacity_bytes": CAPS[name],
                    "tenant_quota_bytes": QUOTA,
                    "lease_seconds": 0.02,
                }
            )
            tier = await Tier.over(guarded, tier_settings, observer=self.ledger.hear)
            stack.push_async_callback(tier.aclose)
            self.faulty[name], self.tiers[name] = faulty, tier

    async def run(self, operations: int) -> float:
        """Until so many operations; seconds."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(self._work(random.Random(self._seed + number), operations))
        return time.perf_counter() - begin

    async def settle(self) -> None:
        """Until nothing is under way and nothing is in doubt."""
        for name, faulty in self.faulty.items():
            faulty.heal()
            guarded = self.tiers[name].inner
            assert isinstance(guarded, Guarded)
            async with asyncio.timeout(30):
                while not (guarded.reading.well and guarded.writing.well):
                    await asyncio.sleep(0.05)
                    await self.tiers[name].store([self._objects[0][0].write()])
            await self.tiers[name].settle()

    async def _work(self, chance: random.Random, operations: int) -> None:
        ledger = self.ledger
        while ledger.operations < operations:
            due = len(ledger.samples) * operations // SAMPLES
            if ledger.operations >= due:
                ledger.samples.append(self._sample())
            turn = asyncio.ensure_future(self._turn(chance))
            if chance.random() < 0.02:
                for _ in range(chance.randrange(30)):
                    await asyncio.sleep(0)
                turn.cancel()
            await asyncio.wait([turn])
            if turn.cancelled():
                ledger.given_up += 1
            else:
                turn.result()

    async def _turn(self, chance: random.Random) -> None:
        """Part of one conversation, from one tier or the other; popular ones more often."""
        tenant = chance.randrange(TENANTS)
        conversation = int(CONVERSATIONS * chance.random() ** 2)
        first = conversation * CHUNKS
        objects = self._objects[tenant][first : first + chance.randint(1, CHUNKS)]
        name = chance.choice(list(self.tiers))
        if chance.random() < 0.01:
            self.ledger.deletes += 1
            await _tolerant(self.tiers[name].delete([objects[0].key]))
        missing = await self._read(name, objects)
        await self._store(name, missing)

    async def _read(self, name: str, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Load what is there; what is not, or could not be had."""
        tier, ledger = self.tiers[name], self.ledger
        keys = [each.key.chunk for each in objects]
        listed = await _tolerant(tier.lookup(keys))
        found = listed if listed is not None else [()] * len(keys)
        ledger.asked += len(keys)
        there = [each for each, infos in zip(objects, found, strict=True) if infos]
        ledger.found += len(there)
        ledger.missed += len(keys) - len(there)
        if not there:
            return list(objects)
        good = await self._load(name, there)
        return [each for each in objects if each.key not in good]

    async def _load(self, name: str, there: Sequence[StoredObject]) -> set[ObjectKey]:
        size = len(there[0].payload)
        by_key = {each.key: each for each in there}
        good: set[ObjectKey] = set()
        with await self.pool.lease(size * len(there), name) as lease:
            reads = [
                Read(each.key, each.info.payload_offset, lease.part(at * size, size))
                for at, each in enumerate(there)
            ]
            seen = 0
            self.ledger.reads += len(reads)
            try:
                async with aclosing(self.tiers[name].load(reads)) as results:
                    async for result in results:
                        seen += 1
                        if self._is_good(name, by_key, result):
                            good.add(result.request.key)  # type: ignore[union-attr]
            except RuntimeError:  # the one that is injected
                pass
            finally:
                self.ledger.read_as["no result"] += len(reads) - seen
        return good

    def _is_good(
        self, name: str, by_key: dict[ObjectKey, StoredObject], result: TransferResult
    ) -> bool:
        outcome = str(result.status)
        if result.status is TransferStatus.OK:
            stored = by_key[result.request.key]  # type: ignore[union-attr]
            view = result.request.buffer.view  # type: ignore[union-attr]
            assert view is not None
            try:
                verify(stored.info, Span(0, stored.info.layout.num_layers), view)
            except IntegrityError:
                outcome = "corrupt"
                self.tiers[name].distrust([stored.key])
        self.ledger.read_as[outcome] += 1
        return outcome == "ok"

    async def _store(self, name: str, objects: Sequence[StoredObject]) -> None:
        """One at a time a key, as a saver does."""
        for each in objects:
            if (name, each.key) in self._storing:
                continue
            self._storing.add((name, each.key))
            self.ledger.stores += 1
            outcome = "no result"
            try:
                results = await self.tiers[name].store([each.write()])
                outcome = str(results[0].status)
            finally:
                self.ledger.stored_as[outcome] += 1
                self._storing.discard((name, each.key))

    def _sample(self) -> Sample:
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        files = len(list(Path("/proc/self/fd").iterdir()))
        pool = self.pool
        return Sample(
            self.ledger.operations, rss, files, pool.leased_bytes, pool.quarantined_bytes()
        )


async def _tolerant(asking: Any) -> Any:
    """An answer, or None where the tier says that it has none."""
    try:
        return await asking
    except BackendError:
        return None

"""Restores over a guarded tier that goes wrong in every way: right bytes, nothing left behind, no
bad object promised twice, and a tier that is taken back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.kv import chunk_keys, key_root, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.faults import Fault, FaultKind, FaultyBackend
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Guarded, HealthLimits
from cacheflow.types import LoadEnded, LoadOutcome, ObjectKey, Span, TierDown, TierUp, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.restore import Restoration
    from cacheflow.types import Event

TOKENS = [(11 * i) % 103 for i in range(500)]
ROOT = key_root({"model": "fake"})
CELLS = 496 * 4
READS = [kind for kind in FaultKind if kind not in (FaultKind.LOST, FaultKind.FULL)]
QUICK = HealthLimits(failures=3, first_wait=0.01, longest_wait=0.05)


class Rig:
    """A fake engine that checks every byte, over a guarded store with faults."""

    def __init__(self, deadline: float, limits: HealthLimits) -> None:
        self.engine = FakeEngine()
        self.store = MemoryBackend()
        self.faulty = FaultyBackend(self.store, seed=5)
        self.events: list[Event] = []
        self.told = asyncio.Event()
        self.tier = Guarded(
            self.faulty, "store", deadline=deadline, limits=limits, observer=self._tell
        )
        self.pool = StagingPool(1 << 20)
        self.keys = chunk_keys(ROOT, TOKENS, self.engine.layout.chunk_tokens)
        self.restorer = Restorer(
            self.engine,
            BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock()),
            {"store": self.tier},
            self.pool,
            observer=self._tell,
        )

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.told.set()

    async def until(self, kind: type[Event]) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(event, kind) for event in self.events):
                self.told.clear()
                await self.told.wait()

    async def well(self) -> None:
        """Until the tier is (again)."""
        async with asyncio.timeout(10):
            while not self.tier.reading.well:
                self.told.clear()
                await self.told.wait()

    async def fill(self) -> None:
        """Every whole chunk, stored through the guard."""
        layout = self.engine.layout
        for chunk, key in enumerate(self.keys):
            layers = range(layout.num_layers)
            payload = bytearray(
                b"".join(self.engine.expected(TOKENS, chunk, layer) for layer in layers)
            )
            name = ObjectKey(key, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
            info, header = seal(
                name, layout, memoryview(payload), grid_id="", segments=(), canonical=False
            )
            await self.tier.store([Write(info, (buffer_from(header), buffer_from(payload)))])

    async def restore(self, name: str = "r", policy: str = "adaptive") -> Restoration:
        """Restore and check every byte."""
        await self.engine.open(name, TOKENS)
        try:
            request = RestoreRequest(name, TOKENS, self.keys, self.restorer.clock.now())
            async with asyncio.timeout(20):
                result = await self.restorer.run(request, load_policy(policy))
            assert self.engine.wrong_cells(name, len(TOKENS)) == []
            return result
        finally:
            await self.engine.close(name)

    def outcomes(self) -> set[LoadOutcome]:
        """How loads have ended since the last call."""
        ended = {event.outcome for event in self.events if isinstance(event, LoadEnded)}
        self.events.clear()
        return ended


@asynccontextmanager
async def rig(deadline: float = 5.0, limits: HealthLimits = QUICK) -> AsyncIterator[Rig]:
    """Filled; nothing may be left at the end."""
    made = Rig(deadline, limits)
    await made.fill()
    async with made.restorer:
        yield made
        made.faulty.heal()
        pool = made.pool
        assert (pool.leased_bytes, pool.quarantined_bytes()) == (0, 0)
        assert made.restorer._jobs == {}
        assert made.restorer.scheduler._requests == {}
    await made.tier.aclose()
    await made.pool.aclose()
    made.engine.shutdown()


@pytest.mark.parametrize(("rate", "policy"), [(0.3, "load"), (1.0, "adaptive")])
@pytest.mark.parametrize("kind", READS)
async def test_every_fault_at_loads_costs_recompute_and_nothing_else(
    kind: FaultKind, rate: float, policy: str
) -> None:
    """Four restores, two of them at once, while it lasts: every byte is right. When it is over, and
    what was damaged has been stored anew, everything is loaded again."""
    async with rig(deadline=1.5 if kind is FaultKind.HANG else 5.0) as r:
        r.faulty.inject(Fault(kind, "load", rate=rate, seconds=0.01))
        await r.restore("a", policy)
        await asyncio.gather(r.restore("b", policy), r.restore("c", policy))
        await r.restore("d", policy)
        r.faulty.heal()
        await r.well()
        await r.fill()
        assert (await r.restore("e", "load")).loaded_cells == {"store": CELLS}


@pytest.mark.parametrize("kind", [k for k in READS if k is not FaultKind.SLOW])
@pytest.mark.parametrize("operation", ["lookup", "*"])
async def test_every_fault_at_lookups_and_everywhere(kind: FaultKind, operation: str) -> None:
    """The same for lookups alone and for everything at once."""
    try:
        fault = Fault(kind, operation)
    except ValueError:
        assert kind in (FaultKind.SHORT, FaultKind.TORN, FaultKind.FLIP, FaultKind.STALE)
        return
    async with rig(deadline=1.5 if kind is FaultKind.HANG else 5.0) as r:
        r.faulty.inject(fault)
        for name in "abcd":
            assert (await r.restore(name)).loaded_cells == {}
        r.faulty.heal()
        await r.well()
        await r.fill()
        assert (await r.restore("e", "load")).loaded_cells == {"store": CELLS}


async def test_what_hangs_is_quarantined_and_lands_in_nobody_elses_memory() -> None:
    """Staging under hung reads is counted and not given out again; when those reads end at last,
    they write what they like, and every byte of the restore under way is still right."""
    async with rig(deadline=0.5) as r:
        r.faulty.inject(Fault(FaultKind.HANG, "load", times=3))
        await r.restore("a", "load")
        quarantined = r.pool.quarantined_bytes("store")
        assert quarantined > 0
        assert r.pool.leased_bytes == 0
        await r.until(TierUp)
        for name in "bc":
            assert (await r.restore(name, "load")).recomputed_cells == 0
            assert r.pool.quarantined_bytes("store") == quarantined
        task = asyncio.create_task(r.restore("d", "load"))
        for _ in range(20):
            await asyncio.sleep(0)
        r.faulty.release()
        assert (await task).recomputed_cells == 0
        assert r.pool.quarantined_bytes() == 0


async def test_a_tier_that_hangs_costs_one_request_its_deadline_and_the_others_nothing() -> None:
    """The first one waits for it; from then on it is not asked, nor waited for."""
    async with rig(deadline=0.1, limits=HealthLimits(first_wait=60.0)) as r:
        r.faulty.inject(Fault(FaultKind.HANG, "load"))
        await r.restore("a", "load")
        await r.until(TierDown)
        strikes = r.faulty.strikes.total()
        for name in "bcd":
            result = await r.restore(name, "load")
            assert (result.failed_loads, result.loaded_cells) == (0, {})
        assert r.faulty.strikes.total() == strikes


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
async def test_a_bad_object_is_not_promised_again(damage: str) -> None:
    """One bad object costs one failed load: the next request is told at once that it is not there,
    and once somebody has stored it anew it is served again."""
    async with rig() as r:
        bad = next(key for key in r.store.objects if key.chunk == r.keys[20])
        if damage == "flipped":
            r.store.objects[bad][-1] ^= 1
        elif damage == "cut":
            del r.store.objects[bad][9000:]
        else:
            listed = r.store.lookup

            async def lookup(keys: Any) -> Any:
                return remembered if r.keys[20] in keys else await listed(keys)

            remembered = await listed(r.keys)
            r.store.lookup = lookup  # type: ignore[method-assign]
            del r.store.objects[bad]
        first = await r.restore("a", "load")
        assert first.failed_loads >= 1
        assert first.recomputed_cells > 0
        second = await r.restore("b", "load")
        assert second.failed_loads == 0
        assert second.recomputed_cells > 0
        await r.fill()
        assert (await r.restore("c", "load")).recomputed_cells == 0
        assert r.tier.reading.well


async def test_sharers_of_a_load_that_fails_are_all_right() -> None:
    """Eight requests with the same prefix, at once, while most of its loads fail in turn."""
    async with rig(limits=HealthLimits(failures=10**6)) as r:
        # A load that hits several counts as the worst: nearly all would only be failed otherwise.
        r.faulty.inject(Fault(FaultKind.FLIP, "load", rate=0.3))
        kinds = (FaultKind.EIO, FaultKind.SHORT, FaultKind.RAISE)
        r.faulty.inject(*(Fault(kind, "load", rate=0.1) for kind in kinds))
        results = await asyncio.gather(*(r.restore(f"r{i}", "load") for i in range(8)))
        assert sum(result.failed_loads for result in results) > 0
        assert LoadOutcome.CORRUPT in r.outcomes()


async def test_a_refused_load_is_not_tried_again_by_its_request() -> None:
    """A request that had looked up before the tier fell sick drops it at its first refusal."""
    async with rig(limits=HealthLimits(first_wait=60.0)) as r:
        r.faulty.inject(Fault(FaultKind.EIO, "load"))
        await asyncio.gather(*(r.restore(f"r{i}", "load") for i in range(6)))
        refused = [
            event.request_id
            for event in r.events
            if isinstance(event, LoadEnded) and event.outcome is LoadOutcome.REFUSED
        ]
        assert refused
        # A few loads of a request may be under way when the first of them is refused.
        assert max(map(refused.count, refused)) <= 3

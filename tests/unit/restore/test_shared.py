"""Requests that begin alike, through the restorer: one of them restores for all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.errors import BackendError
from cacheflow.kv import chunk_keys, key_root, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import ObjectKey, Segment, Span, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.restore import Restoration
    from cacheflow.types import Event, Read, StagedPart, TileWork

COMMON = [(7 * i) % 101 for i in range(384)]
"""Five whole tiles of the fake engine's grid."""
CHUNKS, LAYERS = 24, 4
ROOT = key_root({"model": "fake"})


def prompt(number: int) -> list[int]:
    """The common beginning and less than a chunk of its own."""
    return [*COMMON, *((13 * i + number) % 89 for i in range(9))]


class Rig:
    """An engine that checks every byte, a store with the common beginning, and its reads."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.store = MemoryBackend()
        self.pool = StagingPool(1 << 20)
        self.events: list[Event] = []
        self.cancel_at: tuple[str, int] = ("", 0)
        """Cancel the request at its n-th event."""
        self.tasks: dict[str, asyncio.Task[Restoration]] = {}
        self._seen = 0
        scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), SystemClock())
        self.restorer = Restorer(
            self.engine, scheduler, {"store": self.store}, self.pool, observer=self._observe
        )

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        name, count = self.cancel_at
        if getattr(event, "request_id", "") == name:
            self._seen += 1
            if self._seen == count:
                self.tasks[name].cancel()

    async def fill(self) -> None:
        layout = self.engine.layout
        for chunk, key in enumerate(chunk_keys(ROOT, COMMON, layout.chunk_tokens)):
            parts = (self.engine.expected(COMMON, chunk, layer) for layer in range(LAYERS))
            payload = bytearray(b"".join(parts))
            name = ObjectKey(key, Span(0, LAYERS), Span(0, layout.num_kv_heads))
            info, header = seal(
                name, layout, memoryview(payload), grid_id="", segments=(), canonical=False
            )
            await self.store.store([Write(info, (buffer_from(header), buffer_from(payload)))])

    def start(self, name: str, tokens: list[int], policy: str = "adaptive") -> None:
        keys = chunk_keys(ROOT, tokens, self.engine.layout.chunk_tokens)
        request = RestoreRequest(name, tokens, keys, self.restorer.clock.now())
        running = self.restorer.run(request, load_policy(policy))
        self.tasks[name] = asyncio.create_task(running)

    async def restore(self, count: int, policy: str = "adaptive") -> dict[str, Any]:
        """``count`` requests at once; what each came to. They stay open in the engine."""
        for i in range(count):
            await self.engine.open(f"r{i}", prompt(i))
            self.start(f"r{i}", prompt(i), policy)
        async with asyncio.timeout(20):
            results = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return dict(zip(self.tasks, results, strict=True))

    async def check(self, results: dict[str, Any]) -> None:
        """Whoever came through has every byte; then nothing of anybody is left."""
        for name, result in results.items():
            if not isinstance(result, BaseException):
                assert self.engine.wrong_cells(name, len(COMMON)) == [], name
        assert self.engine.paused == []
        for name in results:
            await self.engine.close(name)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.fill()
    async with made.restorer:
        yield made
        assert made.pool.leased_bytes == made.pool.quarantined_bytes() == 0
        assert made.restorer._jobs == {}
        assert made.restorer._prefixes._holders == {}
        assert made.restorer.scheduler._requests == {}
    await made.pool.aclose()
    made.engine.shutdown()


@pytest.mark.both_loops
async def test_eight_requests_on_one_prefix_restore_it_once() -> None:
    """Eight prompts with one beginning at once: every block of it is loaded or computed once, and
    each request says what of it was its own work."""
    async with rig() as r:
        results = await r.restore(8)
        blocks = r.engine.published + r.engine.recomputed
        assert blocks == CHUNKS * LAYERS
        cells = len(COMMON) * LAYERS
        for result in results.values():
            mine = result.recomputed_cells + sum(result.loaded_cells.values())
            assert mine + result.shared_cells == cells
            assert result.stored_tokens == len(COMMON)
        assert sum(result.shared_cells for result in results.values()) == 7 * cells
        await r.check(results)


async def test_baselines_do_not_share() -> None:
    """The policies that stand for other systems restore each request for itself."""
    async with rig() as r:
        results = await r.restore(3, "load")
        assert r.engine.published == 3 * CHUNKS * LAYERS
        assert [result.shared_cells for result in results.values()] == [0, 0, 0]
        await r.check(results)


@pytest.mark.parametrize("count", range(1, 9))
async def test_whenever_the_leader_is_cancelled_the_others_go_on(count: int) -> None:
    """The first of four is cancelled at its n-th event: the others have every byte, nothing that
    was ready is made ready again, and no lease, task or hidden state is left."""
    async with rig() as r:
        r.cancel_at = ("r0", count)
        results = await r.restore(4)
        assert isinstance(results["r0"], asyncio.CancelledError)
        others = [results[f"r{i}"] for i in range(1, 4)]
        assert not any(isinstance(result, BaseException) for result in others)
        # A load in flight when its request went is asked for again; what landed is not.
        assert r.engine.recomputed <= CHUNKS * LAYERS
        await r.check(results)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0), (3, 0, 5, 1, 6)])
async def test_one_after_the_other_is_cancelled_and_the_last_one_finishes(
    order: Sequence[int],
) -> None:
    """A cancellation every few reads, leaders and followers alike."""
    async with rig() as r:
        reads, left = 0, list(order)

        async def count(read: Read) -> None:
            nonlocal reads
            reads += 1
            if left and reads % 3 == 0:
                r.tasks[f"r{left.pop(0)}"].cancel()

        r.store.before_read = count
        results = await r.restore(8)
        survivors = {f"r{i}" for i in range(8)} - {f"r{i}" for i in order}
        for name in survivors:
            assert not isinstance(results[name], BaseException), results[name]
        await r.check(results)


async def test_a_load_that_fails_is_made_good_for_all_that_share_it() -> None:
    """Reads of some chunks fail while several requests wait for them: all of them get the right
    bytes from recompute, none keeps what was not delivered."""
    async with rig() as r:
        bad = set(chunk_keys(ROOT, COMMON, r.engine.layout.chunk_tokens)[16::3])

        async def fail(read: Read) -> None:
            if read.key.chunk in bad:
                raise BackendError("gone", operation="load", context="test")

        r.store.before_read = fail
        results = await r.restore(4)
        assert not [x for x in results.values() if isinstance(x, BaseException)]
        await r.check(results)


@pytest.mark.parametrize("layer", range(LAYERS))
async def test_compute_that_breaks_under_the_leader_counts_for_nobody(layer: int) -> None:
    """The engine raises in a shared tile: its request ends with the error, the others compute again
    what was claimed there, and have every byte."""
    async with rig() as r:
        broken: list[str] = []

        def fail(work: TileWork, at: int) -> None:
            if not broken and not work.is_suffix and at == layer:
                broken.append(work.request_id)
                raise RuntimeError("no device")

        async def never(read: Read) -> None:
            raise BackendError("gone", operation="load", context="test")

        r.engine.before_layer = fail
        r.store.before_read = never
        results = await r.restore(4)
        failed = [name for name, result in results.items() if isinstance(result, BaseException)]
        assert failed == broken
        assert isinstance(results[broken[0]], RuntimeError)
        await r.check(results)


async def test_a_copy_that_breaks_under_the_leader_counts_for_nobody() -> None:
    """`publish` raises for one request: it ends, its cells are made ready by another."""
    async with rig() as r:
        real = r.engine.publish
        broken: list[str] = []

        async def publish(request_id: str, parts: Sequence[StagedPart]) -> None:
            if not broken:
                broken.append(request_id)
                raise RuntimeError("no device")
            await real(request_id, parts)

        r.engine.publish = publish  # type: ignore[method-assign]  # the engine breaks its promise
        results = await r.restore(4)
        failed = [name for name, result in results.items() if isinstance(result, BaseException)]
        assert failed == broken
        await r.check(results)


async def test_what_is_resident_is_shared_until_it_is_withdrawn() -> None:
    """A prefix in memory is neither loaded nor computed for the next one, which keeps it when the
    first is closed; afterwards nothing is known of it."""
    async with rig() as r:
        r.start("a", prompt(0))
        await r.engine.open("a", prompt(0))
        await r.tasks["a"]
        keys = chunk_keys(ROOT, COMMON, r.engine.layout.chunk_tokens)
        tiles = r.engine.grid.split(0, len(COMMON))
        exact = [Segment(tile.start, tile.stop, tile.width) for tile in tiles]
        r.restorer.offer("a", keys, exact)
        before = r.engine.published + r.engine.recomputed
        await r.engine.open("b", prompt(1))
        r.start("b", prompt(1))
        shared = await r.tasks["b"]
        assert r.engine.published + r.engine.recomputed == before
        assert shared.shared_cells == len(COMMON) * LAYERS
        assert [s.width for s in shared.segments] == [tile.width for tile in tiles]
        r.restorer.withdraw("a")
        await r.engine.close("a")
        await r.check({"b": shared})
        await r.engine.open("c", prompt(2))
        r.start("c", prompt(2))
        assert (await r.tasks["c"]).shared_cells == 0
        await r.check({"c": None})


async def test_a_holder_that_was_closed_without_a_word_is_forgotten() -> None:
    """What the engine no longer has is restored."""
    async with rig() as r:
        keys = chunk_keys(ROOT, COMMON, r.engine.layout.chunk_tokens)
        tile = r.engine.grid.tile(0)
        r.restorer.offer("gone", keys, [Segment(tile.start, tile.stop, tile.width)])
        results = await r.restore(1)
        assert results["r0"].shared_cells == 0
        await r.check(results)


async def test_only_the_very_bits_of_the_grid_are_shared_from_memory() -> None:
    """Tiles computed in pieces, loaded from another history, or lossy are not offered, nor is what
    lies behind them."""
    async with rig() as r:
        keys = chunk_keys(ROOT, COMMON, r.engine.layout.chunk_tokens)
        first, second, third = (r.engine.grid.tile(i) for i in range(3))
        whole = [Segment(t.start, t.stop, t.width) for t in (first, second, third)]
        for wrong in (
            Segment(second.start, second.stop, 0),
            Segment(second.start, second.stop, second.width, lossy=True),
            Segment(second.start, second.start + 16, 16),
        ):
            r.restorer.offer("x", keys, [whole[0], wrong, whole[2]])
            found = r.restorer._prefixes.find(keys, [first, second, third])
            assert found == ("x", [first])
        r.restorer.withdraw("x")

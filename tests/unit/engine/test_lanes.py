"""Order and ownership: streams as the contract has them, cancellation, closing under compute."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cacheflow.plugins.transformers.lanes import CpuStreams, Gathered, Lane
from cacheflow.types import Claim, ComputeBatch, Span, StagedPart, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from cacheflow.plugins.transformers import TransformersEngine

    Engines = Callable[..., AbstractAsyncContextManager[TransformersEngine]]


def prompt(total: int) -> list[int]:
    return random.Random(1).choices(range(3, 128), k=total)


class FakeMark:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self.streams = streams
        self.name = name

    def synchronize(self) -> None:
        self.streams.log.append(f"sync {self.name}")

    def seconds_since(self, earlier: FakeMark) -> float:
        return 1.0


class FakeStreams(CpuStreams):
    """A device that logs what is enqueued where; marks are named after their stream."""

    ahead = 2

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = threading.local()
        self.count = 0

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        self.current.name = name
        try:
            yield
        finally:
            del self.current.name

    def compute(self) -> Any:
        return self.on("compute")

    def copy(self) -> Any:
        return self.on("copy")

    def mark(self) -> FakeMark:
        self.count += 1
        mark = FakeMark(self, f"{self.current.name}{self.count}")
        self.log.append(f"mark {mark.name}")
        return mark

    def wait(self, mark: Any) -> None:
        self.log.append(f"{self.current.name} waits for {mark.name}")

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        assert self.current.name == "compute"
        return torch.tensor(numbers)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    streams = FakeStreams()
    monkeypatch.setattr("cacheflow.plugins.transformers.opening.CpuStreams", lambda: streams)
    return streams


def part(engine: TransformersEngine, layers: Span) -> StagedPart:
    size = len(layers) * engine.layout.layer_stride()
    return StagedPart(0, layers, memoryview(bytearray(size)))


async def test_claims_run_at_most_two_layers_ahead(engine_for: Engines, fake: FakeStreams) -> None:
    """Layer n is claimed only after layer n - 2 has left the device, and never waits for more."""
    async with engine_for(grid=None, chunk_tokens=256) as engine:
        await engine.open("a", prompt(40))
        fake.log.clear()
        fake.count = 0

        def claim(work: TileWork, layer: int) -> Claim:
            fake.log.append(f"claim {layer}")
            return Claim.WRITE

        work = TileWork("a", engine.grid.split(0, 40)[0], 0, is_suffix=True)
        (done,) = await engine.recompute(ComputeBatch((work,)), claim)
        assert fake.log == [
            "mark compute1",
            "claim 0",
            "mark compute2",
            "claim 1",
            "mark compute3",
            "sync compute2",
            "claim 2",
            "mark compute4",
            "sync compute4",
        ]
        assert done.seconds == (1.0, 1.0, 1.0)


async def test_copies_are_ordered_against_compute(engine_for: Engines, fake: FakeStreams) -> None:
    """A capture's copies wait for what compute has enqueued; publish and capture return only when
    the copy stream has passed their last copy, so staging may be reused and compute may follow."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        await engine.prefill("a")
        fake.log.clear()
        fake.count = 0
        await engine.publish("a", [part(engine, Span(0, 2)), part(engine, Span(2, 3))])
        assert fake.log == ["mark copy1", "sync copy1"]
        fake.log.clear()
        await engine.capture("a", [part(engine, Span(0, 3))])
        assert fake.log == [
            "mark compute2",
            "copy waits for compute2",
            "mark copy3",
            "sync copy3",
        ]


class Blocked:
    """A claim that holds the compute thread inside a tile until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.layers: list[int] = []

    def __call__(self, work: TileWork, layer: int) -> Claim:
        self.layers.append(layer)
        self.entered.set()
        assert self.leave.wait(30)
        return Claim.WRITE

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 30)


def first_tile(engine: TransformersEngine, request_id: str) -> ComputeBatch:
    return ComputeBatch((TileWork(request_id, engine.grid.split(0, 32)[0], 0, is_suffix=True),))


@pytest.mark.both_loops
async def test_publish_does_not_queue_behind_compute(engine_for: Engines) -> None:
    """Loaded cells are published while a tile is being computed."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        claim = Blocked()
        computing = asyncio.ensure_future(engine.recompute(first_tile(engine, "a"), claim))
        await claim.until_entered()
        await engine.publish("a", [part(engine, Span(0, 3))])
        assert not computing.done()
        claim.leave.set()
        await computing


@pytest.mark.both_loops
async def test_cancelled_compute_keeps_its_memory_until_it_ends(engine_for: Engines) -> None:
    """Cancelling the caller does not free pages under the thread; closing stops the tile before
    its next layer and waits for the one that runs."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        used = engine.kv_used_bytes
        claim = Blocked()
        computing = asyncio.ensure_future(engine.recompute(first_tile(engine, "a"), claim))
        await claim.until_entered()
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        closing = asyncio.ensure_future(engine.close("a"))
        await asyncio.sleep(0)
        assert not closing.done()
        assert engine.kv_used_bytes == used
        claim.leave.set()
        await closing
        assert engine.kv_used_bytes == 0
        assert claim.layers == [0]


@pytest.mark.both_loops
async def test_a_cancelled_close_still_frees(engine_for: Engines) -> None:
    """Close that is cancelled while it waits frees the KV when the compute ends."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))
        claim = Blocked()
        computing = asyncio.ensure_future(engine.recompute(first_tile(engine, "a"), claim))
        await claim.until_entered()
        closing = asyncio.ensure_future(engine.close("a"))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        claim.leave.set()
        await computing
        assert engine.kv_used_bytes == 0
        await engine.open("a", prompt(40))


async def test_a_claim_that_raises_reaches_the_caller(engine_for: Engines) -> None:
    """An error on the compute thread is the caller's; the thread lives on."""
    async with engine_for() as engine:
        await engine.open("a", prompt(40))

        def claim(work: TileWork, layer: int) -> Claim:
            raise LookupError("no such request")

        with pytest.raises(LookupError, match="no such request"):
            await engine.recompute(first_tile(engine, "a"), claim)
        await engine.prefill("a")
        await engine.first_token("a")


@pytest.mark.both_loops
async def test_a_lane_outlives_its_callers() -> None:
    """Work of a cancelled caller runs to its end, its error goes nowhere, the next is served."""
    lane, gate = Lane("test", 1), threading.Event()

    def fail() -> None:
        gate.wait(30)
        raise ValueError("nobody asks")

    future = lane.submit(fail)
    future.cancel()
    gate.set()
    assert await lane.submit(lambda: torch.is_inference_mode_enabled())
    await lane.stop(5)


async def test_what_waits_together_is_done_together() -> None:
    """As much as is allowed at a time, one at least, in order; each caller hears of its own end,
    and one whose work fails spoils nobody else's."""
    lane, gate, done = Lane("test", 1), threading.Event(), list[list[int]]()

    def do(works: Sequence[int]) -> None:
        done.append(list(works))
        if 4 in works:
            raise ValueError("four")

    gathered = Gathered(lane, do, most=3)
    held = lane.submit(lambda: gate.wait(30))
    sizes = {1: 1, 2: 1, 3: 9, 4: 1, 5: 1, 6: 1, 7: 1}
    futures = {work: gathered.submit(work, nbytes) for work, nbytes in sizes.items()}
    futures[6].cancel()
    gate.set()
    await held
    await asyncio.wait(futures.values())
    await lane.stop(5)
    assert done == [[1, 2, 3], [4, 5, 6], [4], [5], [6], [7]]
    assert str(futures.pop(4).exception()) == "four"
    assert futures.pop(6).cancelled()
    assert [future.result() for future in futures.values()] == [None] * 5


async def test_work_alone_is_done_at_once() -> None:
    """Nobody waits for company."""
    lane, done = Lane("test", 1), list[list[int]]()
    gathered: Gathered[int] = Gathered(lane, lambda works: done.append(list(works)), most=100)
    for work in range(3):
        await gathered.submit(work, 1)
    await lane.stop(5)
    assert done == [[0], [1], [2]]

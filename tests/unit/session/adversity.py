"""An event loop whose every outside event comes when a seeded chance says so, in virtual time.

What stores, threads and the engine do is an event that waits to be let happen; a layer of compute
is one each. Nothing sleeps, and what would wait for ever is found out at once.
"""

from __future__ import annotations

import asyncio
import random
import threading
from heapq import heappop
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import BackendError
from cacheflow.testing.serving import ServingEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, Read, TileWork, Write

__all__ = ["Adversity", "BurntError", "Engine", "LoopClock", "Store", "VirtualLoop"]

_MOST_TURNS: Final = 400_000


class BurntError(Exception):
    """What the engine raises now and then."""


class Adversity:
    """Events that wait to happen; of each kind some are likelier to come next than of another."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.waiting: list[tuple[str, Callable[[], None]]] = []
        self._weights: dict[str, float] = {}
        self.timers_first = self.chance.choice([0.0, 0.02, 0.1, 0.4])
        """How often time passes although something could happen."""
        self.eager = self.chance.choice([0.0, 0.05, 0.3, 0.8])
        """How often something happens although tasks are ready."""

    def add(self, kind: str, happen: Callable[[], None]) -> None:
        if kind not in self._weights:
            self._weights[kind] = 10 ** self.chance.uniform(-2.5, 0)
        self.waiting.append((kind, happen))

    async def wait(self, kind: str, events: int | None = None) -> None:
        """Until so many events of this kind have come."""
        for _ in range(self.chance.choice([0, 0, 1, 1, 1, 2, 5]) if events is None else events):
            came = asyncio.get_running_loop().create_future()
            self.add(kind, lambda came=came: None if came.done() else came.set_result(None))  # type: ignore[misc]
            await came

    def happens(self, often: float) -> bool:
        return self.chance.random() < often

    def next(self) -> None:
        """One of them comes."""
        weights = [self._weights[kind] for kind, _ in self.waiting]
        (at,) = self.chance.choices(range(len(weights)), weights)
        _, happen = self.waiting.pop(at)
        happen()


class _Stepped:
    """Work on a thread of its own, which goes on to its next :meth:`pause` at every event."""

    def __init__(self, events: Adversity, end: Callable[[], None], work: Callable[[], None]):
        self._events, self._end, self._work = events, end, work
        self._go, self._paused, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        events.add("layer", self._step)

    def _run(self) -> None:
        self._go.acquire()
        self._work()
        self._over = True
        self._paused.release()

    def pause(self) -> None:
        self._paused.release()
        self._go.acquire()

    def _step(self) -> None:
        self._go.release()
        self._paused.acquire()
        if self._over:
            self._thread.join()
            self._end()
        else:
            self._events.add("layer", self._step)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when nothing else can happen, or sooner. Work of ``compute`` goes layer by layer,
    that of other executors at one event."""

    def __init__(self, events: Adversity) -> None:
        super().__init__()
        self.events = events
        self.seconds = 0.0
        self.compute: Any = None
        self.walk: _Stepped | None = None
        self._loop: Any = self
        self._turns = 0

    def time(self) -> float:
        return self.seconds

    def _run_once(self) -> None:
        self._turns += 1
        assert self._turns < _MOST_TURNS, "it goes round and round"
        own: Any = self._loop
        if own._ready:
            if self.events.waiting and self.events.happens(self.events.eager):
                self.events.next()
        elif not own._stopping and not self._pass_on(own):
            return
        super()._run_once()  # type: ignore[misc]

    def _pass_on(self, own: Any) -> bool:
        """Nobody is ready: an event comes, or time passes. Whether somebody is ready now."""
        while own._scheduled and own._scheduled[0]._cancelled:
            heappop(own._scheduled)._scheduled = False
            own._timer_cancelled_count -= 1
        timers = own._scheduled
        if self.events.waiting and not (timers and self.events.happens(self.events.timers_first)):
            self.events.next()
        else:
            assert timers, "nothing will ever happen any more"
            self.seconds = max(self.seconds, timers[0]._when)
        self.seconds += 1e-5
        return bool(own._ready or (timers and timers[0]._when <= self.seconds))

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        ended: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                ended.append((func(*args), None))
            except BaseException as error:  # the future's
                ended.append((None, error))

        def end() -> None:
            ((result, error),) = ended
            if not future.done():
                future.set_exception(error) if error else future.set_result(result)

        if executor is not None and executor is self.compute:
            self.walk = _Stepped(self.events, end, work)
        else:

            def run() -> None:
                work()
                end()

            self.events.add("thread", run)
        return future


class LoopClock:
    """The loop's time; a little passes whenever it is asked."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._asked = 0

    def now(self) -> float:
        self._asked += 1
        return self._loop.seconds + self._asked * 1e-7


class Store(MemoryBackend):
    """``faults``: how often something fails."""

    def __init__(self, name: str, events: Adversity, faults: float) -> None:
        super().__init__()
        self._name, self._events, self._faults = name, events, faults

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        await self._events.wait(f"lookup {self._name}")
        if self._events.happens(self._faults):
            raise BackendError("it does not answer", operation="lookup")
        return await super().lookup(keys)

    async def _read(self, read: Read) -> TransferResult:
        await self._events.wait(f"read {self._name}")
        if self._events.happens(self._faults):
            return TransferResult(read, TransferStatus.FAILED, 0, 0.0)
        return await super()._read(read)

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        await self._events.wait(f"write {self._name}")
        if self._events.happens(self._faults):
            return [TransferResult(write, TransferStatus.FAILED, 0, 0.0) for write in writes]
        return await super().store(writes)


class Engine(ServingEngine):
    """``faults``: how often a layer, or what is published, raises BurntError."""

    def __init__(self, loop: VirtualLoop, faults: float, **options: Any) -> None:
        super().__init__(**options)
        self._loop, self._events, self._faults = loop, loop.events, faults
        self._known: dict[tuple[tuple[int, ...], int], bytes] = {}
        loop.compute = self._compute
        self.before_layer = self._layer_begins
        self.before_step = lambda: self._events.wait("decode step")

    def _layer_begins(self, work: TileWork, layer: int) -> None:
        assert self._loop.walk is not None
        self._loop.walk.pause()
        self._burn()

    def _burn(self) -> None:
        if self._events.happens(self._faults):
            raise BurntError

    def expected(self, tokens: Sequence[int], chunk: int, layer: int) -> bytes:
        key = tuple(tokens[: (chunk + 1) * self.layout.chunk_tokens]), layer
        if key not in self._known:
            self._known[key] = super().expected(tokens, chunk, layer)
        return self._known[key]

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        await self._events.wait("open")
        await super().open(request_id, tokens)

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        await self._events.wait("extend")
        await super().extend(request_id, tokens)

    async def close(self, request_id: str) -> None:
        while (running := self._ended.get(request_id)) is not None:
            await running.wait()
        await super().close(request_id)
        await self._events.wait("close")

    async def fork(self, source_id: str, request_id: str, tokens: int) -> None:
        await super().fork(source_id, request_id, tokens)  # at once: the source may go on behind it
        try:
            await self._events.wait("fork")
        except BaseException:  # cancelled: nobody would know of it
            await super().close(request_id)
            raise

    async def truncate(self, request_id: str, tokens: int) -> None:
        await self._events.wait("truncate")
        await super().truncate(request_id, tokens)

    async def capture(self, request_id: str, parts: Any) -> None:
        await self._events.wait("capture")
        await super().capture(request_id, parts)

    async def discard(self, request_id: str, start: int) -> None:
        if request_id in self._tokens:
            await super().discard(request_id, start)
        await self._events.wait("discard")

    async def first_token(self, request_id: str) -> int:
        await self._events.wait("first token")
        return await super().first_token(request_id)

    async def publish(self, request_id: str, parts: Any) -> None:
        self._burn()
        await super().publish(request_id, parts)

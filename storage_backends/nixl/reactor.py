"""The one thread that owns an agent: it begins transfers, looks after them and serves peers.

It sleeps while there is nothing to do, and costs nothing then. A transfer that hangs is looked at
ever less often, for as long as it takes: its memory is held until it has really ended. What ends is
told to the loop, many ends at once. Knows no deadlines and no peers' states: its callers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cacheflow.errors import BackendError, ClosedError
from cacheflow.storage_backends.nixl.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.storage_backends.nixl.agent import Agent
    from cacheflow.storage_backends.nixl.flights import Flight

__all__ = ["Reactor"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Reactor:
    """Use :meth:`start`; methods are called on the loop that started it.

    ``depth``: most transfers with one peer at once; the others wait here, and can be withdrawn.
    """

    def __init__(self, make_agent: Callable[[], Agent], *, depth: int = 16) -> None:
        self._make_agent: Final = make_agent
        self._depth: Final = depth
        self._loop = asyncio.get_running_loop()
        self._todo: queue.SimpleQueue[Callable[[Agent], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._ended: asyncio.Event = asyncio.Event()
        """The thread has nothing left to look after."""
        self._open: set[Flight] = set()
        """On the loop: flights whose end has not been told yet."""
        self._calls: set[asyncio.Future[Any]] = set()
        """On the loop: what somebody waits for in :meth:`call`."""
        self._arrived: deque[tuple[Flight, BaseException | None]] = deque()
        self._is_waking = False
        # Of the thread:
        self._waiting: dict[str, deque[Flight]] = {}
        self._flying: list[Flight] = []
        self._counts: Counter[str] = Counter()
        self._leaving: dict[str, asyncio.Future[None]] = {}
        """Peers to part from as soon as nothing is in flight with them."""
        self._when_idle: deque[Callable[[Agent], None]] = deque()
        self._serving = False
        self._is_stopping = False
        self._pace = Pace()

    @property
    def in_flight(self) -> int:
        """Transfers that may still touch memory here."""
        return len(self._flying)

    async def start(self) -> None:
        """Start the thread and its agent.

        Raises:
            ConfigError: there can be no agent here.
        """
        started: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(
            target=self._run, args=(started,), name="cacheflow-nixl", daemon=True
        )
        thread.start()
        await started

    async def call(self, work: Callable[[Agent], T]) -> T:
        """Run ``work`` on the thread, between two looks at what is in flight."""
        self._check()
        done: asyncio.Future[T] = self._loop.create_future()

        def run(agent: Agent) -> None:
            try:
                result = work(agent)
            except Exception as error:  # carried to whoever waits
                self._tell(done, None, error)
            else:
                self._tell(done, result, None)

        self._calls.add(done)
        done.add_done_callback(self._calls.discard)
        self._todo.put(run)
        return await done

    def submit(self, flight: Flight) -> None:
        """Begin ``flight`` as soon as its peer has room for it.

        Raises:
            ClosedError: the reactor was closed; the flight has let go of its memory.
        """
        if self._is_closed:
            flight.let_go()
            self._check()
        self._open.add(flight)
        self._todo.put(lambda agent: self._accept(agent, flight))

    def withdraw(self, flight: Flight) -> bool:
        """Take ``flight`` back if it has not begun; False if it goes on (or has ended)."""
        if not flight.take():
            return False
        self._open.discard(flight)
        flight.let_go()
        return True

    def part(self, peer: str) -> asyncio.Future[None]:
        """Disconnect from ``peer`` once nothing is in flight with it: before, its transfers could
        still write here, unseen. The answer is done then (or never, if they hang for ever)."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._todo.put(lambda agent: self._leave(agent, peer, done))
        return done

    def order(self, work: Callable[[Agent], None], *, when_idle: bool = False) -> None:
        """Run ``work`` on the thread, soon, or as soon as nothing is in flight. Nobody waits for
        it; if it raises, that is logged."""
        self._todo.put(
            self._when_idle_append(work) if when_idle else partial(self._carry_out, work)
        )

    def serve(self, is_wanted: bool) -> None:
        """Whether peers may be at our memory: then the thread makes progress for them."""
        self._todo.put(lambda agent: setattr(self, "_serving", is_wanted))

    async def aclose(self, seconds: float) -> bool:
        """Withdraw what has not begun, wait a while for the rest; True if it has ended.

        Who still waits gets a ClosedError. The thread goes on until the last transfer has ended,
        then its agent is gone.
        """
        self._is_closed = True
        error = ClosedError("the NIXL transport was closed")
        for flight in list(self._open):
            if self.withdraw(flight):
                flight.told(error)
        self._todo.put(lambda agent: setattr(self, "_is_stopping", True))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        for flight in list(self._open):
            flight.told(error)
        self._open.clear()
        for call in list(self._calls):
            if not call.done():
                call.set_exception(error)
        return self._ended.is_set()

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the NIXL transport was closed")

    # -- on the thread -------------------------------------------------------------------------

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            agent = self._make_agent()
        except Exception as error:  # carried to whoever waits
            self._tell(started, None, error)
            return
        self._tell(started, None, None)
        while self._flying or not self._is_stopping:
            self._take_orders(agent)
            self._look(agent)
            if self._serving:
                self._attempt(agent.progress)
        del agent
        self._on_loop(self._ended.set)

    def _take_orders(self, agent: Agent) -> None:
        """All there are; sleeps until there is one, or until it is time to look again."""
        wait = self._pace.wait(
            time.monotonic(), in_flight=bool(self._flying), serving=self._serving
        )
        with contextlib.suppress(queue.Empty):
            self._todo.get(timeout=wait)(agent)
            while not self._is_stopping:
                self._todo.get_nowait()(agent)

    def _accept(self, agent: Agent, flight: Flight) -> None:
        self._waiting.setdefault(flight.peer, deque()).append(flight)
        self._begin_next(agent, flight.peer)

    def _when_idle_append(self, work: Callable[[Agent], None]) -> Callable[[Agent], None]:
        return lambda agent: self._when_idle.append(work)

    def _carry_out(self, work: Callable[[Agent], None], agent: Agent) -> None:
        self._attempt(partial(work, agent))

    def _begin_next(self, agent: Agent, peer: str) -> None:
        waiting = self._waiting.get(peer)
        while waiting and self._counts[peer] < self._depth:
            flight = waiting.popleft()
            if flight.take():
                self._begin(agent, flight)
        if not waiting:
            self._waiting.pop(peer, None)

    def _begin(self, agent: Agent, flight: Flight) -> None:
        self._pace.moved(time.monotonic())
        try:
            if flight.peer in self._leaving:
                raise BackendError("the peer is gone", operation="transfer", is_temporary=True)
            if flight.before is not None:
                flight.before()
            flight.handle = agent.begin(
                flight.way, flight.peer, flight.ours, flight.kind, flight.theirs
            )
        except Exception as error:  # NIXL's errors have no base class of their own
            self._end(flight, error)
            return
        self._flying.append(flight)
        self._counts[flight.peer] += 1

    def _look(self, agent: Agent) -> None:
        for flight in list(self._flying):
            error = None
            try:
                if not agent.has_ended(flight.handle):
                    continue
            except Exception as caught:  # as above
                error = caught
            self._flying.remove(flight)
            self._land(agent, flight, error)
        while self._when_idle and not self._flying:
            self._attempt(partial(self._when_idle.popleft(), agent))

    def _land(self, agent: Agent, flight: Flight, error: Exception | None) -> None:
        self._pace.moved(time.monotonic())
        self._attempt(lambda: agent.release(flight.handle))
        flight.handle = None
        if error is None and flight.after is not None:
            flight.after()
        self._end(flight, error)
        self._counts[flight.peer] -= 1
        self._begin_next(agent, flight.peer)
        if (done := self._leaving.get(flight.peer)) is not None:
            self._leave(agent, flight.peer, done)

    def _end(self, flight: Flight, error: Exception | None) -> None:
        flight.let_go()
        self._arrived.append((flight, error))
        if not self._is_waking:
            self._is_waking = True
            self._on_loop(self._deliver)

    def _leave(self, agent: Agent, peer: str, done: asyncio.Future[None]) -> None:
        if self._counts[peer] > 0:
            self._leaving[peer] = done
            return
        self._leaving.pop(peer, None)
        del self._counts[peer]
        self._attempt(partial(agent.remove, peer))
        self._tell(done, None, None)

    @staticmethod
    def _attempt(work: Callable[[], None]) -> None:
        """What is only good to have done."""
        try:
            work()
        except Exception as error:  # as above
            _log.warning("NIXL: %r", error)

    # -- back to the loop ----------------------------------------------------------------------

    def _deliver(self) -> None:
        self._is_waking = False  # before looking: what comes later wakes again
        while self._arrived:
            flight, error = self._arrived.popleft()
            if flight in self._open:  # else closing has told it already
                self._open.discard(flight)
                flight.told(error)

    def _tell(self, done: asyncio.Future[T], result: T | None, error: Exception | None) -> None:
        def tell() -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # None only where T is None
            else:
                done.set_exception(error)

        self._on_loop(tell)

    def _on_loop(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits
            self._loop.call_soon_threadsafe(work)

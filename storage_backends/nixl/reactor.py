"""The one thread that owns an agent, and the way to it from the loop and back.

It sleeps while there is nothing to do, and costs nothing then. A transfer that hangs is looked at
ever less often, for as long as it takes: its memory is held until it has really ended. What ends is
told to the loop, many ends at once. Knows no deadlines and no peers' states: its callers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cacheflow.errors import ClosedError
from cacheflow.storage_backends.nixl.orders import Orders
from cacheflow.storage_backends.nixl.traffic import Traffic, attempt, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.storage_backends.nixl.agent import Agent, Range
    from cacheflow.storage_backends.nixl.flights import Flight

__all__ = ["Reactor"]

T = TypeVar("T")


class Reactor:
    """Use :meth:`start`; methods are called on the loop it was made on.

    ``depth``: most transfers with one peer at once; the others wait here, and can be withdrawn.
    """

    def __init__(self, make_agent: Callable[[], Agent], *, depth: int = 16) -> None:
        self._make_agent: Final = make_agent
        self._loop = asyncio.get_running_loop()
        self._todo: Orders[Callable[[Agent], None]] = Orders()
        self._is_closed = False
        self._ended: asyncio.Event = asyncio.Event()
        """The thread has nothing left to look after."""
        self._open: set[Flight] = set()
        """On the loop: flights whose end has not been told yet."""
        self._calls: set[asyncio.Future[Any]] = set()
        """On the loop: what somebody waits for in :meth:`call`."""
        self._arrived: deque[tuple[Flight, Exception | None]] = deque()
        """From the thread to the loop."""
        self._is_waking = False
        self._traffic = Traffic(depth, lambda *ended: self._arrived.append(ended))
        """The thread's, as is what follows."""
        self._is_stopping = False
        self._turn_since: float | None = None

    @property
    def stuck_seconds(self) -> float:
        """How long the thread has been at one turn. NIXL does not wait, so it comes back soon."""
        since = self._turn_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def in_flight(self) -> int:
        """Transfers that may still touch memory here."""
        return len(self._traffic.flying)

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
        try:
            await started
        except asyncio.CancelledError:  # nobody knows of the thread: it ends with its agent
            self._is_closed = True
            self._stop()
            raise

    async def call(self, work: Callable[[Agent], T]) -> T:
        """Run ``work`` on the thread, between two looks at what is in flight.

        Raises:
            CacheFlowError: what it raised: NIXL's own errors as BackendError.
            ClosedError: the reactor was closed before it was its turn.
        """
        self._check()
        done: asyncio.Future[T] = self._loop.create_future()

        def run(agent: Agent) -> None:
            try:
                result = work(agent)
            except Exception as error:  # carried to whoever waits
                self._tell(done, None, plain(error))
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
        self._todo.put(lambda agent: self._traffic.accept(flight))

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
        parted = partial(self._tell, done, None, None)
        self._todo.put(lambda agent: self._traffic.part(agent, peer, parted))
        return done

    def order(self, work: Callable[[Agent], None], *, after: Range | None = None) -> None:
        """Run ``work`` on the thread, soon, or as soon as no transfer touches the memory ``after``.
        Nobody waits for it; if it raises, that is logged."""
        if after is not None:
            self._todo.put(lambda agent: self._traffic.later(after, work))
        else:
            self._todo.put(lambda agent: attempt(partial(work, agent)))

    def serve(self, longest: float | None) -> None:
        """Make progress for peers that may be at our memory, often from now on, and at least every
        ``longest`` seconds when they have been quiet for long; None: there are none."""

        def begin(agent: Agent) -> None:
            service = self._traffic.service
            service.longest, service.last = longest, time.monotonic()

        self._todo.put(begin)

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
        self._stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)
        for flight in list(self._open):
            flight.told(error)
        self._open.clear()
        for call in list(self._calls):
            if not call.done():
                call.set_exception(error)
        return self._ended.is_set()

    def _stop(self) -> None:
        self._todo.put(lambda agent: setattr(self, "_is_stopping", True))

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the NIXL transport was closed")

    # -- on the thread -------------------------------------------------------------------------

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            agent = self._make_agent()
        except Exception as error:  # carried to whoever waits
            self._tell(started, None, plain(error))
            return
        self._tell(started, None, None)
        while self._traffic.flying or not self._is_stopping:
            self._turn(agent, self._todo.take(self._traffic.wait()))
        del agent  # here, on its own thread
        self._on_loop(self._ended.set)

    def _turn(self, agent: Agent, orders: list[Callable[[Agent], None]]) -> None:
        """Orders that come meanwhile are of the next one."""
        self._turn_since = time.monotonic()
        for order in orders:
            order(agent)
        self._traffic.turn(agent)
        self._turn_since = None
        if self._arrived:
            self._wake()

    def _wake(self) -> None:
        """The loop hears of all that has ended in this turn."""
        if not self._is_waking:
            self._is_waking = True
            self._on_loop(self._deliver)
        # In shared memory it was copied, for milliseconds and in the kernel, by this thread. Who
        # woke up on this core meanwhile (the event loop's thread, say) would wait for the next
        # tick, else.
        os.sched_yield()

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

    # -- on the loop again ---------------------------------------------------------------------

    def _deliver(self) -> None:
        self._is_waking = False  # before looking: what comes later wakes again
        while self._arrived:
            flight, error = self._arrived.popleft()
            if flight in self._open:  # else closing has told it already
                self._open.discard(flight)
                flight.told(error)

"""What the reactor's thread looks after: flights that wait, that are on their way, that have ended.

Peers take turns, each with so many flights at once. Belongs to that thread and does not wait: it
says how long the thread may. Knows no loop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError, CacheFlowError
from cacheflow.storage_backends.nixl.pace import Pace, Service

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.storage_backends.nixl.agent import Agent, Range
    from cacheflow.storage_backends.nixl.flights import Flight

__all__ = ["Traffic", "attempt", "plain"]

_log = logging.getLogger(__name__)
_WORK_SECONDS: Final = 500e-6
"""A look for peers that takes more of the processor has moved data: empty ones took 0.03 ms, and on
a busy machine up to 0.3, those that moved data about 2 ms."""
_TURN_BYTES: Final = 8 << 20
"""What is begun in one turn, with each peer: in shared memory it is copied there and then, and
nobody is told before the turn ends. A turn costs about 0.1 ms beside its copies."""


class Traffic:
    """``depth``: most flights with one peer at once. ``ended`` is told of each, and its error.
    ``processor_time``: seconds that this thread has computed."""

    def __init__(
        self,
        depth: int,
        ended: Callable[[Flight, Exception | None], None],
        processor_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self.flying: list[Flight] = []
        self.service = Service()
        """When progress is made for peers."""
        self._depth: Final = depth
        self._ended = ended
        self._processor_time = processor_time
        self._waiting: dict[str, deque[Flight]] = {}
        self._counts: Counter[str] = Counter()
        self._leaving: dict[str, Callable[[], None]] = {}
        self._later: list[tuple[Range, Callable[[Agent], None]]] = []
        self._pace = Pace()

    def wait(self) -> float | None:
        """Seconds until :meth:`turn` is due; None: not before something comes up."""
        if any(map(self._has_room, self._waiting)):
            return 0.0
        in_flight, now = bool(self.flying), time.monotonic()
        return self._pace.wait(now, in_flight=in_flight, serving=self.service.wait(now))

    def accept(self, flight: Flight) -> None:
        """Begin it when it is its turn."""
        self._waiting.setdefault(flight.peer, deque()).append(flight)

    def turn(self, agent: Agent) -> None:
        """Some flights more for each peer that has room, and a look at all that are on their
        way."""
        left = dict.fromkeys(self._waiting, _TURN_BYTES)
        while left:
            for peer in list(left):
                if left[peer] > 0 and self._has_room(peer):
                    left[peer] -= self._begin_one(agent, peer)
                else:
                    del left[peer]
        for flight in list(self.flying):
            self._look(agent, flight)
        if self._later:
            self._do_later(agent)
        if self.service.longest is not None:
            self._serve(agent)

    def later(self, memory: Range, work: Callable[[Agent], None]) -> None:
        """Do ``work`` as soon as no flight that was accepted touches ``memory``; others may."""
        self._later.append((memory, work))

    def _do_later(self, agent: Agent) -> None:
        waiting = [flight for queue in self._waiting.values() for flight in queue]
        flights = [*self.flying, *waiting]
        for each in list(self._later):
            memory, work = each
            if not any(flight.touches(memory) for flight in flights):
                self._later.remove(each)
                attempt(partial(work, agent))

    def _serve(self, agent: Agent) -> None:
        """NIXL does not say whether there was anything to do; the time it took does."""
        start = self._processor_time()
        attempt(agent.progress)
        if self._processor_time() - start > _WORK_SECONDS:
            self.service.last = time.monotonic()

    def part(self, agent: Agent, peer: str, parted: Callable[[], None]) -> None:
        """Remove ``peer`` as soon as nothing is in flight with it; what waits is refused."""
        for flight in self._waiting.pop(peer, ()):
            if flight.take():
                self._end(flight, _gone())
        if self._counts[peer] > 0:
            self._leaving[peer] = parted
            return
        self._leaving.pop(peer, None)
        del self._counts[peer]
        attempt(partial(agent.remove, peer))
        parted()

    def _has_room(self, peer: str) -> bool:
        return peer in self._waiting and self._counts[peer] < self._depth

    def _begin_one(self, agent: Agent, peer: str) -> int:
        """How many bytes that one moves."""
        waiting = self._waiting[peer]
        flight = waiting.popleft()
        if not waiting:
            del self._waiting[peer]
        if not flight.take():
            return 0
        self._pace.moved(time.monotonic())
        try:
            self._begin(agent, flight)
        except Exception as error:  # NIXL's errors have no base class of their own
            self._end(flight, plain(error))
            return 0
        self.flying.append(flight)
        self._counts[peer] += 1
        return sum(nbytes for _, nbytes in flight.ours)

    def _begin(self, agent: Agent, flight: Flight) -> None:
        if flight.peer in self._leaving:
            raise _gone()
        if flight.before is not None:
            flight.before()
        flight.handle = agent.begin(
            flight.way, flight.peer, flight.ours, flight.kind, flight.theirs
        )

    def _look(self, agent: Agent, flight: Flight) -> None:
        error = None
        try:
            if not agent.has_ended(flight.handle):
                return
        except Exception as caught:  # as above
            error = plain(caught)
        self.flying.remove(flight)
        self._counts[flight.peer] -= 1
        self._pace.moved(time.monotonic())
        attempt(partial(agent.release, flight.handle))
        flight.handle = None
        if error is None and flight.after is not None:
            flight.after()
        self._end(flight, error)
        if (parted := self._leaving.get(flight.peer)) is not None:
            self.part(agent, flight.peer, parted)

    def _end(self, flight: Flight, error: Exception | None) -> None:
        flight.let_go()
        self._ended(flight, error)


def _gone() -> BackendError:
    return BackendError("the peer is gone", operation="transfer", is_temporary=True)


def plain(error: Exception) -> CacheFlowError:
    """``error`` without the frames that it came through, and in our words.

    Frames hold NIXL's objects. One that leaves the thread with an error is destroyed wherever the
    last reference ends, and an agent that dies on another thread aborts the process.
    """
    if isinstance(error, CacheFlowError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    reason = f"{type(error).__name__}: {error}"
    return BackendError(reason, operation="transfer", is_temporary=True)


def attempt(work: Callable[[], object]) -> None:
    """What is only good to have done."""
    try:
        work()
    except Exception as error:  # NIXL's errors have no base class of their own
        _log.warning("NIXL: %r", error)

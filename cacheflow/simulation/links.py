"""Modelled channels: serial links, and one pipe whose bandwidth many nodes share.

A load occupies its link for ``bytes / bandwidth`` and is there ``latency`` later, so latency of
one load hides behind the bytes of the next. Knows no schedulers: it moves transfers.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.simulation.events import EventLoop
    from cacheflow.types import Load

__all__ = ["Link", "Port", "SerialLink", "SharedPipe", "Transfer", "Wire"]


class Wire:
    """``nbytes`` on the wire. ``start`` and ``stop``: when they were, in virtual seconds."""

    __slots__ = ("nbytes", "start", "stop")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.start = self.stop = 0.0


class Transfer(Wire):
    """One load on the wire."""

    __slots__ = ("load", "ok")

    def __init__(self, load: Load, ok: bool) -> None:
        super().__init__(load.nbytes)
        self.load = load
        self.ok = ok


W = TypeVar("W", bound=Wire)


class Link(Protocol):
    """What a node sends its loads over, and its stores where both share it."""

    def send(self, transfer: W, done: Callable[[W], None]) -> None:
        """Queue ``transfer``; ``done(transfer)`` is called when it has arrived."""
        ...


class SerialLink:
    """A link of one node: loads one after the other at ``bandwidth`` bytes a second.

    ``speed(now)`` scales the bandwidth, taken when a load's bytes begin to flow: drift, contention.
    """

    __slots__ = ("_free_at", "_loop", "bandwidth", "latency", "speed")

    def __init__(
        self,
        loop: EventLoop,
        bandwidth: float,
        latency: float = 0.0,
        *,
        speed: Callable[[float], float] | None = None,
    ) -> None:
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {bandwidth}")
        self.bandwidth = bandwidth
        self.latency = latency
        self.speed = speed
        self._loop = loop
        self._free_at = 0.0

    def send(self, transfer: W, done: Callable[[W], None]) -> None:
        now = self._loop.time
        start = self._free_at if self._free_at > now else now
        rate = self.bandwidth if self.speed is None else self.bandwidth * self.speed(start)
        transfer.start = start
        transfer.stop = self._free_at = start + transfer.nbytes / rate
        self._loop.at(transfer.stop + self.latency, done, transfer)


class SharedPipe:
    """Bandwidth split evenly among the nodes that are sending, each at most ``port_bandwidth``.

    Processor sharing in virtual service: one number says how many bytes every active port has been
    served, so a change of the number of ports costs O(log ports), not a new plan for each.
    """

    def __init__(
        self,
        loop: EventLoop,
        bandwidth: float,
        latency: float = 0.0,
        *,
        port_bandwidth: float = inf,
    ) -> None:
        if not (bandwidth > 0 and port_bandwidth > 0):
            raise ValueError(f"bandwidths must be positive, got {bandwidth}, {port_bandwidth}")
        self.bandwidth = bandwidth
        self.latency = latency
        self.port_bandwidth = port_bandwidth
        self._loop = loop
        self._served = 0.0
        self._mark = 0.0
        self._active: list[tuple[float, int, Port]] = []
        self._order = count()
        self._generation = 0

    def port(self) -> Port:
        """A node's own serial queue into the pipe."""
        return Port(self)

    def _rate(self) -> float:
        return min(self.port_bandwidth, self.bandwidth / max(1, len(self._active)))

    def _settle(self) -> None:
        now = self._loop.time
        self._served += (now - self._mark) * self._rate()
        self._mark = now

    def begin(self, port: Port) -> None:
        """``port`` has bytes to send and was idle."""
        self._settle()
        self._push(port)
        self._arm()

    def _push(self, port: Port) -> None:
        transfer, _ = port.queue[0]
        transfer.start = self._loop.time
        heappush(self._active, (self._served + transfer.nbytes, next(self._order), port))

    def _arm(self) -> None:
        self._generation += 1
        if self._active:
            seconds = max(0.0, self._active[0][0] - self._served) / self._rate()
            self._loop.at(self._loop.time + seconds, self._ended, self._generation)

    def _ended(self, generation: int) -> None:
        if generation != self._generation:
            return  # the number of active ports has changed since
        self._settle()
        finish, _, port = heappop(self._active)
        self._served = max(self._served, finish)
        transfer, done = port.queue.popleft()
        transfer.stop = self._loop.time
        self._loop.at(transfer.stop + self.latency, done, transfer)
        if port.queue:
            self._push(port)
        self._arm()


class Port:
    """One node's way into a :class:`SharedPipe`: its loads go one after the other."""

    __slots__ = ("_pipe", "queue")

    def __init__(self, pipe: SharedPipe) -> None:
        self._pipe = pipe
        self.queue: deque[tuple[Wire, Callable[[Any], None]]] = deque()

    def send(self, transfer: W, done: Callable[[W], None]) -> None:
        self.queue.append((transfer, done))
        if len(self.queue) == 1:
            self._pipe.begin(self)

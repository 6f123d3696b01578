"""Links in virtual time that finish loads as real channels do, and how to keep them busy."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.costs import ChannelModel

__all__ = ["Parallel", "Serial", "drive"]


class Channel(Protocol):
    """Says when ``nbytes`` asked for at ``now`` will be there."""

    def finish(self, nbytes: int, now: float) -> float: ...


@dataclass
class Serial:
    """One pipe: bytes follow each other, each load ``latency`` later; ``wobble()`` scales times."""

    bandwidth: float
    latency: float = 0.0
    wobble: Callable[[], float] = lambda: 1.0
    free_at: float = 0.0

    def finish(self, nbytes: int, now: float) -> float:
        # The pipe is entered when the request has got there, and left at the end of the bytes.
        seconds = nbytes / self.bandwidth * self.wobble()
        self.free_at = max(now + self.latency, self.free_at) + seconds
        return self.free_at


@dataclass
class Parallel:
    """``streams`` pipes that share nothing: loads end in another order than they began."""

    streams: int
    bandwidth: float
    latency: float = 0.0
    wobble: Callable[[], float] = lambda: 1.0
    free_at: list[float] = field(default_factory=list)

    def finish(self, nbytes: int, now: float) -> float:
        if not self.free_at:
            self.free_at = [0.0] * self.streams
        start = max(now, heapq.heappop(self.free_at))
        end = start + self.latency + nbytes * self.streams / self.bandwidth * self.wobble()
        heapq.heappush(self.free_at, end)
        return end


_IDS = count()


def drive(
    model: ChannelModel,
    channel: Channel,
    loads: int,
    *,
    depth: int,
    size: Callable[[], int],
    now: float = 0.0,
    delivered: Callable[[], bool] = lambda: True,
) -> float:
    """Keep ``depth`` of ``loads`` in flight until all have ended; when that was."""
    ends: list[tuple[float, int]] = []
    for _ in range(loads):
        if len(ends) == depth:
            now = _end(model, ends, delivered)
        load, nbytes = next(_IDS), size()
        model.started(load, nbytes, now)
        heapq.heappush(ends, (channel.finish(nbytes, now), load))
    while ends:
        now = _end(model, ends, delivered)
    return now


def _end(
    model: ChannelModel, ends: list[tuple[float, int]], delivered: Callable[[], bool]
) -> float:
    now, load = heapq.heappop(ends)
    model.ended(load, now, delivered=delivered())
    return now

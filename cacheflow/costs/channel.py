"""What a channel delivers, learned from the loads that ended on it.

One ``ChannelModel`` is one link with its own bandwidth, shared by everything that loads over it.
Loads are assumed to be served roughly in the order they were started. Knows no bytes but counts.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ChannelModel"]

_MEMORY_SECONDS: Final = 2.0
"""Busy time after which an observation has lost about two thirds of its weight."""
_MEMORY_LOADS: Final = 12.0
"""The same in loads, so that a fast channel averages over several."""


class ChannelModel:
    """Bandwidth as decayed bytes over decayed *busy* seconds, with the loads now in flight.

    Busy time is the union of the intervals with something in flight, so depth and parallel streams
    are accounted for without a model of them.
    """

    __slots__ = ("_busy", "_bytes", "_in_flight", "_mark", "_progress")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._busy = 0.0
        self._in_flight: dict[int, int] = {}
        self._mark = 0.0
        """Up to when busy time has been counted."""
        self._progress = 0.0
        """When the channel last became busy or finished something."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, or None before the first completion."""
        return self._bytes / self._busy if self._busy > 0 else None

    @property
    def in_flight_bytes(self) -> int:
        return sum(self._in_flight.values())

    @property
    def in_flight(self) -> int:
        """Loads started and not ended."""
        return len(self._in_flight)

    def started(self, load_id: int, nbytes: int, now: float) -> None:
        """A load was handed to the backend."""
        if not self._in_flight:
            self._mark = self._progress = now
        self._in_flight[load_id] = nbytes

    def ended(self, load_id: int, now: float, *, delivered: bool) -> None:
        """A load ended; only delivered bytes count towards the bandwidth."""
        nbytes = self._in_flight.pop(load_id, None)
        if nbytes is None:
            return
        busy = max(now - self._mark, 1e-9)
        self._mark = self._progress = now
        keep = max(0.0, 1.0 - max(busy / _MEMORY_SECONDS, 1 / _MEMORY_LOADS))
        self._busy = self._busy * keep + busy
        self._bytes = self._bytes * keep + (nbytes if delivered else 0)

    def ahead(self, load_id: int) -> int:
        """Bytes in flight up to and including ``load_id``, in the order of starting."""
        total = 0
        for other, nbytes in self._in_flight.items():
            total += nbytes
            if other == load_id:
                break
        return total

    def left(self, nbytes: float, now: float) -> float | None:
        """Seconds until ``nbytes`` (from the head of the line on) will have been delivered.

        A head of line that is overdue is expected to take as long again as it is late, so a
        channel that hangs looks slower every moment. None while nothing is known and nothing is
        late: a channel that has never answered looks as slow as it has been silent.
        """
        bandwidth = self.bandwidth
        waited = now - self._progress if self._in_flight else 0.0
        if bandwidth is None or bandwidth <= 0:
            return waited if self._in_flight else None
        need = nbytes / bandwidth
        late = waited - self._head() / bandwidth
        return need + late if late > 0 else max(need - waited, 0.0)

    def slower_than(self, seconds: float, nbytes: float, now: float) -> float:
        """When ``left(nbytes)`` will exceed ``seconds`` if nothing is delivered before.

        At the earliest ``now``; used to set the timer after which recompute races a late load.
        """
        if not self._in_flight:
            return float("inf")
        bandwidth = self.bandwidth
        if bandwidth is None or bandwidth <= 0:
            return max(now, self._progress + seconds)
        due = self._progress + self._head() / bandwidth
        return max(now, due + max(0.0, seconds - nbytes / bandwidth))

    def _head(self) -> int:
        return next(iter(self._in_flight.values()), 0)

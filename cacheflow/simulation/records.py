"""What a node notes down: requests, busy seconds, bars of a timeline, spans of time.

Pure bookkeeping in virtual seconds; decides nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import inf

__all__ = ["Record", "Spans", "Usage", "Work"]


@dataclass(slots=True)
class Record:
    """What became of one request. Times are virtual seconds; infinite: not yet."""

    request_id: str
    node: int
    arrival: float
    prefix_tokens: int
    suffix_tokens: int
    restored: float = inf
    """When the last cell of the prefix was ready."""
    first_token: float = inf
    """When the suffix was computed too."""
    cells: dict[str, int] = field(default_factory=dict)
    """Token-blocks of the prefix by source: ``recompute`` and one entry a channel; known with the
    first token."""
    failed_loads: int = 0
    dropped_loads: int = 0
    in_flight: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token - self.arrival


@dataclass(slots=True)
class Usage:
    """Seconds of one resource: ``busy`` in all, ``useful`` for cells and suffixes that count.

    ``useful`` of compute counts only while a prefix was waiting to be restored. ``intervals`` holds
    ``start, stop, start, stop, ...`` when the node records them.
    """

    busy: float = 0.0
    useful: float = 0.0
    intervals: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Work:
    """A bar of the timeline: tokens ``[tile_start, tile_stop)`` through layer blocks, or a load."""

    request_id: str
    source: str
    """``recompute``, ``suffix`` or a channel."""
    tile_start: int
    tile_stop: int
    first_layer: int
    last_layer: int
    """One behind the last."""
    start: float
    stop: float


class Spans:
    """How long a count has been above zero, and when."""

    __slots__ = ("_count", "_since", "_sum", "spans")

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._sum = 0.0
        self.spans: list[tuple[float, float]] = []

    def enter(self, now: float) -> None:
        if not self._count:
            self._since = now
        self._count += 1

    def leave(self, now: float) -> None:
        self._count -= 1
        if not self._count:
            self._sum += now - self._since
            self.spans.append((self._since, now))

    def total(self, now: float) -> float:
        return self._sum + now - self._since if self._count else self._sum

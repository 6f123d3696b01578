"""How long an operation may take before it is given up, from what its channel delivers.

Learns from every operation that ended well, through the cost model of a channel. Knows no tier.
"""

from __future__ import annotations

from itertools import count
from typing import Final

from cacheflow.costs import ChannelModel

__all__ = ["Patience"]

_LEAST: Final = 2.0
"""Seconds that anything may take: a busy machine stands still for a second now and then."""
_TIMES: Final = 16.0
"""... and so many times what is expected: a tier that has become slow is still of use."""
_COLD: Final = 4.0
_COLD_RATE: Final = 1e6
"""Where nothing is known: seconds, and bytes a second."""


class Patience:
    """Of one direction of one channel. ``longest``: seconds that nothing may exceed."""

    __slots__ = ("_ids", "_longest", "_model")

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._model = ChannelModel()
        self._ids = count()

    def begin(self, nbytes: int, now: float) -> tuple[int, float]:
        """An operation begins: its number, and the seconds that it may take."""
        model = self._model
        expected = model.left(model.in_flight_bytes + nbytes, now) if model.bandwidth else None
        number = next(self._ids)
        model.started(number, nbytes, now)
        if expected is None:
            return number, min(_COLD + nbytes / _COLD_RATE, self._longest)
        return number, min(max(_TIMES * expected, _LEAST), self._longest)

    def end(self, number: int, now: float, *, delivered: bool) -> None:
        """It has ended."""
        self._model.ended(number, now, delivered=delivered)

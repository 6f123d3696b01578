"""Forward passes that read blocks while their last layers are still being loaded.

The runner asks for each layer before its attention reads it, and is held up until that layer is in
place. A load that fails or is late holds nobody up: the pass goes on over whatever is there, and
at its end the blocks are named to vLLM, which drops what the pass said for the requests that read
them and computes those blocks. So is every pass whose runner did not ask for all layers. Belongs to
the worker's main thread; :meth:`Overlaps.poke` is for any.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.clock import Clock
    from cacheflow.plugins.vllm.records import Overlap
    from cacheflow.plugins.vllm.restoring import Restoring

__all__ = ["Overlaps"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """``restore`` is None if the worker does not know it (any more)."""

    restore: Restoring | None
    overlap: Overlap
    until: float
    broken: bool = False

    def fails(self) -> bool:
        """Whether something it reads will not come."""
        restore = self.restore
        return restore is None or restore.closed or restore.floor > self.overlap.first

    def has(self, layer: int) -> bool:
        return self.restore is not None and self.restore.has(layer, self.overlap.first)

    def give_up(self) -> None:
        """What is not there belongs to compute."""
        self.broken = True
        if self.restore is not None:
            self.restore.settle()
            self.restore.take(self.restore.low)


class Overlaps:
    """Those of one step at a time."""

    def __init__(self, layers: int, clock: Clock) -> None:
        self._layers = layers
        self._clock = clock
        self._changed = threading.Condition()
        self._readings: list[_Reading] = []
        self._asked = 0
        """Layers asked for in this step, as bits."""
        self._computes = False
        self._invalid: set[int] = set()
        self._news: bool | None = None
        self._by_layer: bool | None = None

    def begin(self, computes: bool) -> None:
        """A step begins; ``computes``: it has a forward pass."""
        self._computes = computes
        self._asked = 0
        self._readings.clear()

    def read(self, restore: Restoring | None, overlap: Overlap) -> None:
        """The step reads what is still being loaded for ``restore``."""
        until = self._clock.now() + overlap.seconds
        self._readings.append(_Reading(restore, overlap, until))

    def poke(self) -> None:
        """Something is in place, or has failed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Before ``layer`` is read: return when it is there for everything that the step reads, or
        will not come in time."""
        self._asked |= 1 << layer
        for reading in self._readings:
            if not reading.broken:
                self._wait(reading, layer)

    def _wait(self, reading: _Reading, layer: int) -> None:
        with self._changed:
            while not reading.has(layer):
                left = reading.until - self._clock.now()
                if left <= 0 or reading.fails():
                    break
                self._changed.wait(left)
            else:
                return
        reading.give_up()

    def end(self) -> None:
        """The forward pass is over: see whether everything that it read was there in time."""
        if self._computes:
            self._learn(self._asked == (1 << self._layers) - 1)
        for reading in self._readings:
            if self._by_layer and not reading.broken:
                self._wait(reading, self._layers - 1)
            if not self._by_layer:
                reading.give_up()
            if reading.broken:
                self._invalid.update(reading.overlap.ids)
            elif reading.restore is not None:
                reading.restore.settle()
        self._readings.clear()

    def _learn(self, by_layer: bool) -> None:
        if by_layer is not self._by_layer:
            self._by_layer = self._news = by_layer

    def take_invalid(self) -> set[int]:
        """Ids of blocks that were read and were not there."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_news(self) -> bool | None:
        """Whether passes ask for each layer, if that is not as it was."""
        news, self._news = self._news, None
        return news

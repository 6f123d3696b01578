"""S3-FIFO: three first-in-first-out queues instead of an order of recency.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1, in bytes instead of objects. What comes in waits in a small queue (a tenth of all
bytes); what is not used again there leaves early, so a scan cannot wash out the rest. What was used
moves to the main queue, which gives everything as many more rounds as it was used (at most three).
Names of what left the small queue early are remembered: whoever comes back goes to main at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from cacheflow.tiers.eviction.protocol import Spared

__all__ = ["S3Fifo"]

K = TypeVar("K", bound=Hashable)

_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3
_PROVEN: Final = 2
"""Uses in the small queue that are worth a place in main (the paper: more than one)."""


class S3Fifo(Generic[K]):
    """Ignores what a use is worth; a touch of no weight is none.

    The paper counts the insertion's own miss as no use, and so does this: ``uses`` of an insert is
    ignored unless the key has proven itself before (more than one).
    """

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        """Hashes of keys: a wrong match costs a place in main, nothing else."""
        self._uses: dict[K, int] = {}
        self._small_bytes = self._main_bytes = 0

    def __len__(self) -> int:
        return len(self._uses)

    def insert(
        self, key: K, nbytes: int, worth: float = 1.0, uses: float = 1.0, boost: float = 1.0
    ) -> None:
        self._uses[key] = 0
        if uses > 1.0 or self._ghosts.pop(hash(key), self) is None:
            self._to_main(key, nbytes)
        else:
            self._small[key] = nbytes
            self._small_bytes += nbytes

    def admits(self, nbytes: int, worth: float = 1.0, uses: float = 1.0) -> bool:
        return True

    def touch(
        self, key: K, weight: float = 1.0, worth: float | None = None, boost: float | None = None
    ) -> None:
        uses = self._uses.get(key)
        if uses is not None and weight > 0.0:
            self._uses[key] = min(uses + 1, _MOST_USES)

    def remove(self, key: K) -> None:
        if self._uses.pop(key, None) is None:
            return
        self._small_bytes -= self._small.pop(key, 0)
        self._main_bytes -= self._main.pop(key, 0)

    def victims(self, nbytes: int, spared: Spared[K]) -> list[K]:
        leaving: list[K] = []
        held: list[tuple[OrderedDict[K, int], K, int]] = []
        gathered = 0
        while gathered < nbytes and (self._small or self._main):
            queue = self._small if self._is_small_due() else self._main
            key, size = next(iter(queue.items()))
            if spared(key):
                held.append((queue, key, queue.pop(key)))
            elif not self._stays(queue, key, size):
                if queue is self._small:
                    self._remember(key)
                self.remove(key)
                leaving.append(key)
                gathered += size
        for queue, key, size in reversed(held):
            queue[key] = size
            queue.move_to_end(key, last=False)
        return leaving

    def _is_small_due(self) -> bool:
        if not (self._small and self._main):
            return bool(self._small)
        return self._small_bytes >= _SMALL_SHARE * (self._small_bytes + self._main_bytes)

    def _stays(self, queue: OrderedDict[K, int], key: K, size: int) -> bool:
        """Whether the oldest of ``queue`` was used: it moves to main, or goes round once more."""
        uses = self._uses[key]
        if queue is self._main:
            self._uses[key] = max(uses - 1, 0)
            queue.move_to_end(key)
            return uses > 0
        if uses < _PROVEN:
            return False
        del queue[key]
        self._small_bytes -= size
        self._uses[key] = 0
        self._to_main(key, size)
        return True

    def _to_main(self, key: K, nbytes: int) -> None:
        self._main[key] = nbytes
        self._main_bytes += nbytes

    def _remember(self, key: K) -> None:
        self._ghosts[hash(key)] = None
        while len(self._ghosts) > max(len(self._uses), 16):
            self._ghosts.popitem(last=False)

"""A free list over one range of addresses: best fit, coalescing. Numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["FreeList"]


class FreeList:
    """Offsets of free bytes in ``[0, capacity)``. Not thread-safe."""

    __slots__ = ("_by_offset", "_offsets", "capacity", "free")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._offsets = [0] if capacity else []
        self._by_offset = {0: capacity} if capacity else {}

    def take(self, size: int) -> int | None:
        """Offset of ``size`` bytes (> 0) that are free no longer, or None if no gap is as large."""
        fits = [(gap, offset) for offset, gap in self._by_offset.items() if gap >= size]
        if not fits:
            return None
        gap, offset = min(fits)
        self._remove(offset)
        if gap > size:
            self._insert(offset + size, gap - size)
        self.free -= size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free what :meth:`take` gave."""
        self.free += size
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset + size:
            size += self._remove(offset + size)
        if at > 0:
            before = self._offsets[at - 1]
            if before + self._by_offset[before] == offset:
                size += self._remove(before)
                offset = before
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._offsets, offset)
        self._by_offset[offset] = size

    def _remove(self, offset: int) -> int:
        del self._offsets[bisect_left(self._offsets, offset)]
        return self._by_offset.pop(offset)

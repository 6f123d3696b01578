"""Sums for metrics: added up anywhere, taken once a step. What they are called is listed here."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["METRICS", "Counts", "split"]

METRICS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "vllm:cacheflow_transfer_bytes": ("Bytes that arrived.", ("tier", "direction")),
    "vllm:cacheflow_load_failures": ("Loads that did not deliver, by reason.", ("tier", "reason")),
    "vllm:cacheflow_lookup_chunks": ("Blocks asked of a tier, by result.", ("tier", "result")),
    "vllm:cacheflow_store_dropped": ("Blocks a tier did not take, by reason.", ("tier", "reason")),
    "vllm:cacheflow_restore_tokens": ("Prefix tokens of restores, by who made them.", ("source",)),
    "vllm:cacheflow_overlaps": ("Prompts gone on under their last loads, by end.", ("result",)),
    "vllm:cacheflow_restores": ("Requests with stored blocks, by how they went on.", ("how",)),
}
"""Counter -> what it counts, and its labels. Names begin like vLLM's own, which it takes out of the
registry before another engine of the same process puts them in again."""

_BETWEEN: Final = "\t"


class Counts:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter of :data:`METRICS` (without ``vllm:cacheflow_``)."""
        key = _BETWEEN.join((f"vllm:cacheflow_{name}", *labels))
        with self._lock:
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last time; keys are for :func:`split`."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return taken


def split(key: str) -> tuple[str, tuple[str, ...]]:
    """Name and label values of a key of :meth:`Counts.take`."""
    name, *labels = key.split(_BETWEEN)
    return name, tuple(labels)

"""CacheFlow's counters in vLLM's own ``/metrics``: sums travel with each step's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheflow.plugins.vllm.counts import METRICS, split

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CacheFlowPromMetrics", "CacheFlowStats"]


class CacheFlowStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last step, by the keys of :mod:`cacheflow.plugins.vllm.counts`."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: CacheFlowStats) -> CacheFlowStats:
        keys = self.data.keys() | other.data.keys()
        sums = {key: self.data.get(key, 0.0) + other.data.get(key, 0.0) for key in keys}
        return CacheFlowStats(data=sums)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: a name, its label values, a number."""
        return {" ".join((name, *labels)): total for name, labels, total in self._rows()}

    def is_empty(self) -> bool:
        return not self.data

    def _rows(self) -> list[tuple[str, tuple[str, ...], float]]:
        return [(*split(key), total) for key, total in sorted(self.data.items())]


class CacheFlowPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters, with vLLM's labels before ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            name: make(name=name, documentation=what, labelnames=[*labelnames, *labels])
            for name, (what, labels) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, labels = split(key)
            self._counters[name].labels(*engine, *labels).inc(amount)

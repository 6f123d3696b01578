"""The series CacheFlow exports: names, labels and what each means, in one place.

Counters and histograms only; ratios are left to PromQL. Live gauges are in
:mod:`cacheflow.metrics.live`. Dashboards and rules are checked against what is declared here.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["Series"]

_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)
_ERRORS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
_EFFICIENCIES: Final = (*(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), *(1.0, 1.1, 1.25, 1.5, 2.0))
_SHARES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Series:
    """Every metric of one instance, in that instance's ``registry``.

    ``stage``: of a pipeline; it then stands in front of what the ``stage`` label says.
    """

    def __init__(self, registry: CollectorRegistry, stage: int | None = None) -> None:
        self._registry = registry
        self._requests()
        self._transfers()
        self._tiers()
        self._costs()
        for to in ("load", "recompute"):  # a rate is known before the first of them
            self.fallbacks.labels(to)
        self.stage = "" if stage is None else str(stage)
        """Value of a ``stage`` label that is about the whole of it."""
        self._stage = self.stage and f"{stage}/"
        for suffix in (False, True):
            self.computed(is_suffix=suffix)

    def computed(self, *, is_suffix: bool) -> Counter:
        """Compute's seconds: ``prefix`` and ``suffix``; ``1/prefix``, ... in a pipeline's stage."""
        return self.compute_busy.labels(self._stage + ("suffix" if is_suffix else "prefix"))

    def _requests(self) -> None:
        self.ttft = self._histogram(
            "ttft_seconds", "Arrival of a request to its first token.", "policy", "outcome"
        )
        self.restore = self._histogram(
            "restore_seconds", "Arrival to the last cell of the prefix.", "policy", "outcome"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens of answered requests, by where their KV came from: resident, suffix, "
            "recompute or a tier (token-layers divided by layers).",
            "source",
        )
        self.tenant_ttft = self._histogram(
            "tenant_ttft_seconds", "Arrival of a tenant's request to its first token.", "tenant"
        )
        self.tenant_tokens = self._counter(
            "tenant_prompt_tokens",
            "Prompt tokens of a tenant's answered requests, by where their KV came from: resident, "
            "loaded, or computed.",
            "tenant",
            "source",
        )
        self.restore_tokens = self._counter(
            "restore_tokens",
            "Prefix tokens made ready, by who made them (token-layers divided by layers).",
            "source",
        )
        self.recomputed = self._histogram(
            "recomputed_ratio",
            "Share of a restored prefix that was recomputed: where the pointers met.",
            "policy",
            buckets=_SHARES,
        )
        self.fallbacks = self._counter(
            "fallbacks", "Restores that could have used both ways and ended with one.", "to"
        )
        self.hedged = self._counter(
            "hedged_cells",
            "Chunk-layers that recompute had taken before their load arrived, by the tier that "
            "was too slow.",
            "tier",
        )
        self.compute_busy = self._counter(
            "compute_busy_seconds", "Seconds the compute stream worked.", "stage"
        )

        self.balance = self._gauge(
            "stage_balance_ratio",
            "Mean over the longest of a pipeline's latest restores: 1 where all stages end "
            "together. Only in a pipeline.",
            "stage",
        )

    def _transfers(self) -> None:
        moved = ("tier", "direction")
        self.io_busy = self._counter(
            "io_busy_seconds",
            "Seconds a channel had something in flight (union of intervals).",
            *moved,
        )
        self.transfer_bytes = self._counter("transfer_bytes", "Bytes that arrived.", *moved)
        self.transfer_seconds = self._histogram(
            "transfer_seconds", "Begin to end of one load or store.", *moved
        )
        self.lookups = self._counter(
            "lookup_chunks", "Chunks asked of a tier, by result.", "tier", "result"
        )
        self.lookup_seconds = self._histogram(
            "lookup_seconds", "How long a tier took to say what it has.", "tier"
        )
        self.load_failures = self._counter(
            "load_failures", "Loads that did not deliver, by reason.", "tier", "reason"
        )
        self.store_dropped = self._counter(
            "store_dropped", "Chunks that a tier did not take, by reason.", "tier", "reason"
        )

    def _tiers(self) -> None:
        self.evictions = self._counter(
            "evictions", "Objects that left a tier, by reason.", "tier", "reason"
        )
        self.used_bytes = self._gauge(
            "tier_used_bytes", "Bytes of the objects that a tier holds.", "tier"
        )
        self.capacity_bytes = self._gauge(
            "tier_capacity_bytes",
            "Most bytes that a tier may hold; 0 where only its backend has a cap.",
            "tier",
        )
        self.tier_down = self._gauge(
            "tier_down",
            "1 while a tier is set aside as sick in this direction.",
            "tier",
            "direction",
        )
        self.tier_downs = self._counter(
            "tier_set_aside", "Times a tier was set aside as sick.", "tier", "direction"
        )

    def _costs(self) -> None:
        self.cost_error = self._histogram(
            "cost_error",
            "How far outcomes were from predictions, as a share of these: a median a restore.",
            "kind",
            buckets=_ERRORS,
        )
        self.efficiency = self._histogram(
            "predicted_efficiency",
            "Seconds that a restore was expected to take with all resources to itself, as a share "
            "of those it took: 1 is as good as the cost models know.",
            "policy",
            buckets=_EFFICIENCIES,
        )
        self.loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0),
        )
        self.info = self._gauge(
            "info", "1, with what this instance is.", "version", "model", "policy"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cacheflow_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"cacheflow_{name}", text, labels, registry=self._registry)

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS
    ) -> Histogram:
        return Histogram(
            f"cacheflow_{name}", text, labels, buckets=buckets, registry=self._registry
        )

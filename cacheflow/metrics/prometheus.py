"""Events -> Prometheus series, one registry per instance.

Names and labels are those of the project's monitoring contract; ratios are left to PromQL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cacheflow.types import (
    CostChecked,
    Evicted,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    RestoreEnded,
    StoreDropped,
    StoreEnded,
    TierUsage,
)

if TYPE_CHECKING:
    from cacheflow.types import Event

__all__ = ["PrometheusObserver"]

_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)
_ERRORS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)


class PrometheusObserver:
    """An observer that counts. Several in one process never clash: each owns its ``registry``."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._restore = Histogram(
            "cacheflow_restore_seconds",
            "Arrival to the last cell of the prefix.",
            ("policy", "outcome"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "cacheflow_restore_tokens",
            "Prefix tokens made ready, by who made them (token-layers divided by layers).",
            ("source",),
            registry=registry,
        )
        self._compute = Counter(
            "cacheflow_compute_busy_seconds",
            "Seconds the compute stream worked.",
            ("stage",),
            registry=registry,
        )
        self._io = Counter(
            "cacheflow_io_busy_seconds",
            "Seconds a channel had something in flight (union of intervals).",
            ("tier", "direction"),
            registry=registry,
        )
        self._bytes = Counter(
            "cacheflow_transfer_bytes",
            "Bytes that arrived.",
            ("tier", "direction"),
            registry=registry,
        )
        self._failures = Counter(
            "cacheflow_load_failures",
            "Loads that did not deliver, by reason.",
            ("tier", "reason"),
            registry=registry,
        )
        self._lookups = Counter(
            "cacheflow_lookup_chunks",
            "Chunks asked of a tier, by result.",
            ("tier", "result"),
            registry=registry,
        )
        self._dropped = Counter(
            "cacheflow_store_dropped",
            "Chunks that a tier did not take, by reason.",
            ("tier", "reason"),
            registry=registry,
        )
        self._evictions = Counter(
            "cacheflow_evictions",
            "Objects that left a tier, by reason.",
            ("tier", "reason"),
            registry=registry,
        )
        self._used = Gauge(
            "cacheflow_tier_used_bytes",
            "Bytes of the objects that a tier holds.",
            ("tier",),
            registry=registry,
        )
        self._capacity = Gauge(
            "cacheflow_tier_capacity_bytes",
            "Most bytes that a tier may hold; 0 where only its backend has a cap.",
            ("tier",),
            registry=registry,
        )
        self._managed: set[str] = set()
        """Tiers that say themselves what they do not take."""
        self._cost_error = Histogram(
            "cacheflow_cost_error",
            "How far outcomes were from predictions, as a share of these: a median a restore.",
            ("kind",),
            buckets=_ERRORS,
            registry=registry,
        )
        self._busy_until: dict[tuple[str, str], float] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case LayersComputed():
                stage = "suffix" if event.is_suffix else "prefix"
                self._compute.labels(stage).inc(event.stop - event.starts[0])
            case LoadEnded():
                self._moved(event.channel, "load", event.start, event.stop)
                if event.outcome in (LoadOutcome.PUBLISHED, LoadOutcome.DROPPED):
                    self._bytes.labels(event.channel, "load").inc(event.nbytes)
                else:
                    self._failures.labels(event.channel, event.outcome.value).inc()
            case LookedUp():
                self._lookups.labels(event.channel, "hit").inc(event.found)
                self._lookups.labels(event.channel, "miss").inc(event.asked - event.found)
            case StoreEnded():
                self._moved(event.channel, "store", event.start, event.stop)
                if event.outcome == "ok":
                    self._bytes.labels(event.channel, "store").inc(event.nbytes)
                elif event.outcome != "full" or event.channel not in self._managed:
                    self._dropped.labels(event.channel, event.outcome).inc(event.chunks)
            case StoreDropped():
                self._dropped.labels(event.channel, event.reason).inc(event.objects)
            case Evicted():
                self._evictions.labels(event.channel, event.reason).inc(event.objects)
            case TierUsage():
                self._managed.add(event.channel)
                self._used.labels(event.channel).set(event.used_bytes)
                self._capacity.labels(event.channel).set(event.capacity_bytes)
            case RestoreEnded():
                seconds = event.restored - event.arrival
                self._restore.labels(event.policy, event.outcome).observe(seconds)
                for source, cells in event.cells.items():
                    self._tokens.labels(source).inc(cells / event.num_layers)
            case CostChecked():
                self._cost_error.labels(event.kind).observe(abs(event.ratio - 1.0))
            case _:
                pass

    def _moved(self, tier: str, direction: str, start: float, stop: float) -> None:
        """Add the part of ``[start, stop]`` that was not counted yet."""
        since = max(start, self._busy_until.get((tier, direction), start))
        if stop > since:
            self._io.labels(tier, direction).inc(stop - since)
            self._busy_until[tier, direction] = stop

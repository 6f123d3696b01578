"""Events -> Prometheus series, one registry per instance.

Names and labels are those of the project's monitoring contract (:mod:`cacheflow.metrics.series`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from cacheflow.metrics.series import Series
from cacheflow.types import (
    CostChecked,
    Evicted,
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    RestoreEnded,
    StoreDropped,
    StoreEnded,
    TierDown,
    TierUp,
    TierUsage,
)

if TYPE_CHECKING:
    from cacheflow.types import Event

__all__ = ["PrometheusObserver"]

_ONE_WAY: Final = ("load", "recompute")
"""Policies that never use both ways: theirs is no fall-back."""
_KINDS: Final = {
    "resident": "resident",
    "shared": "resident",
    "suffix": "computed",
    "recompute": "computed",
}
"""Where a tenant's tokens came from, if not from a tier."""


class PrometheusObserver:
    """An observer that counts. Several in one process never clash: each owns its ``registry``.

    ``max_tenants``: so many, first come, have a label of their own; the others are ``other``.
    ``stage``: the number of this rank's pipeline stage.
    """

    def __init__(self, *, max_tenants: int = 20, stage: int | None = None) -> None:
        self.registry = CollectorRegistry()
        self.series = Series(self.registry, stage)
        self._busy_until: dict[tuple[str, str], float] = {}
        self._managed: set[str] = set()
        """Tiers that say themselves what they do not take."""
        self._max_tenants = max_tenants
        self._tenants: dict[str, str] = {"": "default"}
        """Label of every tenant that has one."""

    def __call__(self, event: Event) -> None:
        series = self.series
        match event:
            case LayersComputed():
                busy = series.computed(is_suffix=event.is_suffix)
                busy.inc(event.stop - event.starts[0])
            case LoadEnded():
                self._loaded(event)
            case LookedUp():
                series.lookups.labels(event.channel, "hit").inc(event.found)
                series.lookups.labels(event.channel, "miss").inc(event.asked - event.found)
                series.lookup_seconds.labels(event.channel).observe(event.stop - event.start)
            case StoreEnded():
                self._stored(event)
            case RestoreEnded():
                self._restored(event)
            case FirstToken():
                self._answered(event)
            case CostChecked():
                series.cost_error.labels(event.kind).observe(abs(event.ratio - 1.0))
            case _:
                self._tier(event)

    def _tier(self, event: Event) -> None:
        series = self.series
        match event:
            case StoreDropped():
                series.store_dropped.labels(event.channel, event.reason).inc(event.objects)
            case Evicted():
                series.evictions.labels(event.channel, event.reason).inc(event.objects)
            case TierUsage():
                self._managed.add(event.channel)
                series.used_bytes.labels(event.channel).set(event.used_bytes)
                series.capacity_bytes.labels(event.channel).set(event.capacity_bytes)
            case TierDown():
                series.tier_down.labels(event.channel, event.direction).set(1)
                series.tier_downs.labels(event.channel, event.direction).inc()
            case TierUp():
                series.tier_down.labels(event.channel, event.direction).set(0)
            case _:
                pass

    def _loaded(self, event: LoadEnded) -> None:
        series = self.series
        self._moved(event.channel, "load", event.start, event.stop)
        if event.outcome not in (LoadOutcome.PUBLISHED, LoadOutcome.DROPPED):
            series.load_failures.labels(event.channel, event.outcome.value).inc()
            return
        series.transfer_bytes.labels(event.channel, "load").inc(event.nbytes)
        in_vain = event.outcome is LoadOutcome.DROPPED and not event.hidden
        hedged = len(event.layers) * event.chunks if in_vain else 0
        series.hedged.labels(event.channel).inc(hedged)  # a rate is known before the first of them

    def _stored(self, event: StoreEnded) -> None:
        series = self.series
        self._moved(event.channel, "store", event.start, event.stop)
        if event.outcome == "ok":
            series.transfer_bytes.labels(event.channel, "store").inc(event.nbytes)
        elif event.outcome != "full" or event.channel not in self._managed:
            series.store_dropped.labels(event.channel, event.outcome).inc(event.chunks)

    def _restored(self, event: RestoreEnded) -> None:
        series = self.series
        seconds = event.restored - event.arrival
        series.restore.labels(event.policy, event.outcome).observe(seconds)
        for source, cells in event.cells.items():
            series.restore_tokens.labels(source).inc(cells / event.num_layers)
        if event.stage_balance is not None:
            series.balance.labels(series.stage).set(event.stage_balance)
        total, recomputed = sum(event.cells.values()), event.cells.get("recompute", 0)
        if event.outcome != "restored" or not (total and event.stored_tokens):
            return
        series.recomputed.labels(event.policy).observe(recomputed / total)
        if event.expected:
            took = max(event.stop - event.arrival, 1e-9)
            series.efficiency.labels(event.policy).observe(event.expected / took)
        if event.policy not in _ONE_WAY and recomputed in (0, total):
            series.fallbacks.labels("recompute" if recomputed else "load").inc()

    def _answered(self, event: FirstToken) -> None:
        series = self.series
        series.ttft.labels(event.policy, event.outcome).observe(event.at - event.arrival)
        for source, cells in event.cells.items():
            series.prompt_tokens.labels(source).inc(cells / event.num_layers)
        tenant = self._tenant(event.tenant)
        series.tenant_ttft.labels(tenant).observe(event.at - event.arrival)
        for source, cells in event.cells.items():
            kind = _KINDS.get(source, "loaded")
            series.tenant_tokens.labels(tenant, kind).inc(cells / event.num_layers)

    def _tenant(self, name: str) -> str:
        """The label of a tenant; there are never more than were agreed on."""
        if name not in self._tenants and len(self._tenants) <= self._max_tenants:
            self._tenants[name] = name
        return self._tenants.get(name, "other")

    def _moved(self, tier: str, direction: str, start: float, stop: float) -> None:
        """Count the part of ``[start, stop]`` that was not counted yet as busy."""
        self.series.transfer_seconds.labels(tier, direction).observe(stop - start)
        since = max(start, self._busy_until.get((tier, direction), start))
        if stop > since:
            self.series.io_busy.labels(tier, direction).inc(stop - since)
            self._busy_until[tier, direction] = stop

"""What is true right now, read when it is scraped: restores, loads, staging memory.

Knows nothing of a flow but the few numbers that :class:`Live` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from cacheflow.types import StorePart

__all__ = ["Live", "LiveGauges", "Sessions"]


class Live(Protocol):
    """The state of a flow that is worth a gauge; read on the event loop's thread."""

    @property
    def active_restores(self) -> int: ...

    def pending_loads(self) -> Mapping[str, int]:
        """Loads in flight, by tier."""
        ...

    def quarantined_bytes(self) -> Mapping[str, int]:
        """Staging memory that waits for I/O to end, by tier."""
        ...

    def tier_parts(self) -> Mapping[str, Sequence[StorePart]]:
        """The servers that tiers are made of."""
        ...

    @property
    def staging_bytes(self) -> tuple[int, int]:
        """Staging memory in use, and in all."""
        ...


class Sessions(Protocol):
    """Whoever knows the sessions; a flow does."""

    def session_counts(self) -> Mapping[str, int]:
        """Known sessions, by state."""
        ...


class LiveGauges:
    """A Prometheus collector over ``live`` and, if any, ``sessions``. Scraped from another thread
    it may be a moment old."""

    def __init__(self, live: Live, sessions: Sessions | None = None) -> None:
        self._live = live
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        live = self._live
        yield GaugeMetricFamily(
            "cacheflow_active_restores", "Requests being restored.", live.active_restores
        )
        text = "Loads in flight on a channel."
        yield _by("tier", "cacheflow_pending_loads", text, live.pending_loads())
        yield _by(
            "tier",
            "cacheflow_quarantined_bytes",
            "Staging memory that waits for given-up I/O to end.",
            live.quarantined_bytes(),
        )
        parts = live.tier_parts()
        yield _parts(parts)
        yield _repairs(parts)
        used, capacity = live.staging_bytes
        yield GaugeMetricFamily("cacheflow_staging_used_bytes", "Staging memory in use.", used)
        yield GaugeMetricFamily("cacheflow_staging_capacity_bytes", "Staging memory.", capacity)
        if self._sessions is not None:
            text = "Sessions that are known: resident (with KV in memory), or forgotten."
            yield _by("state", "cacheflow_sessions", text, self._sessions.session_counts())


def _by(label: str, name: str, text: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _parts(parts: Mapping[str, Sequence[StorePart]]) -> GaugeMetricFamily:
    labels = ("tier", "part", "transport")
    text = "1 while a server of a tier is used, by what its bytes travel by."
    family = GaugeMetricFamily("cacheflow_tier_part_up", text, labels=labels)
    for tier, of in parts.items():
        for part in of:
            family.add_metric((tier, part.name, part.transport), float(part.is_up))
    return family


def _repairs(parts: Mapping[str, Sequence[StorePart]]) -> CounterMetricFamily:
    labels = ("tier", "part", "result")
    text = "Copies that a server of a tier had lost, by whether it got them again."
    family = CounterMetricFamily("cacheflow_tier_part_repairs", text, labels=labels)
    for tier, of in parts.items():
        for part in of:
            family.add_metric((tier, part.name, "copied"), part.repaired)
            family.add_metric((tier, part.name, "dropped"), part.not_repaired)
    return family

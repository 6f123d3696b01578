"""Series of a store process, beside those of its two tiers (``arena`` and ``spill``).

Read when they are scraped; a scrape from another thread may be a moment old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from cacheflow.pool.server import StoreServer

__all__ = ["StoreCollector"]

_COUNTS: Final = {
    "lookup_chunks": "Chunks that clients asked for.",
    "lookup_hits": "Chunks of these of which anything was there.",
    "leases": "Leases given.",
    "leases_expired": "Leases that ended without a word of the client.",
    "commits": "Objects that became visible.",
    "refused": "Objects that there was no room for, or that arrived damaged.",
    "aborted": "Slots that were given back unwritten.",
    "read_in": "Objects read back from disk.",
}


class StoreCollector:
    """A Prometheus collector over ``server``."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        server = self._server
        directory = server.directory
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"cacheflow_pool_{name}", text, directory.counts[name])
        clients = GaugeMetricFamily(
            "cacheflow_pool_clients", "Connections, by transport.", labels=("transport",)
        )
        for transport, number in server.clients().items():
            clients.add_metric((transport,), number)
        yield clients
        yield GaugeMetricFamily(
            "cacheflow_pool_leased_slots", "Slots leased now.", directory.grants.leases
        )
        yield GaugeMetricFamily(
            "cacheflow_pool_uncommitted_bytes",
            "Of slots that are being written.",
            directory.grants.uncommitted_bytes,
        )
        if (spill := directory.spill) is not None:
            yield GaugeMetricFamily(
                "cacheflow_pool_spill_waiting", "Objects not on disk yet.", spill.waiting
            )
            yield CounterMetricFamily(
                "cacheflow_pool_spill_lost",
                "Objects that left the arena before they were on disk.",
                spill.lost,
            )

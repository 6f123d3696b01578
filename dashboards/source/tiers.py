"""Each place chunks live: what it has, how fast it is, what it loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panels import INSTANCE, TIER, TIERS, board, heat, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["tiers"]

_RATE = "$__rate_interval"


def tiers() -> Dashboard:
    """Hits, bytes, latency, occupancy, losses and failures by tier."""
    made = board("cacheflow-tiers", "CacheFlow: tiers", "Each place chunks live.", tiers=TIERS)
    for panels in (_traffic, _contents, _failures):
        made = panels(made)
    return made


def _traffic(made: Dashboard) -> Dashboard:
    """What is asked, how much comes, how fast."""
    return (
        made.with_panel(
            share(
                "Chunks found",
                "Share of the chunks asked of a tier that it had.",
                {
                    "{{tier}}": f"sum by (tier) (rate(cacheflow_lookup_chunks_total{{{TIER}, "
                    f'result="hit"}}[{_RATE}])) / sum by (tier) '
                    f"(rate(cacheflow_lookup_chunks_total{{{TIER}}}[{_RATE}]))"
                },
            )
        )
        .with_panel(
            rates(
                "Bytes a second",
                "Loads and stores that arrived.",
                {
                    "{{tier}} {{direction}}": "sum by (tier, direction) (rate("
                    f"cacheflow_transfer_bytes_total{{{TIER}}}[{_RATE}]))"
                },
                unit="Bps",
            )
        )
        .with_panel(
            heat(
                "Load time",
                "Loads by how long they took.",
                "sum by (le) (increase(cacheflow_transfer_seconds_bucket"
                f'{{{TIER}, direction="load"}}[{_RATE}]))',
            )
        )
        .with_panel(
            rates(
                "Load and lookup time p99",
                "By tier.",
                {
                    "load {{tier}}": "histogram_quantile(0.99, sum by (le, tier) (rate("
                    f'cacheflow_transfer_seconds_bucket{{{TIER}, direction="load"}}[{_RATE}])))',
                    "lookup {{tier}}": "histogram_quantile(0.99, sum by (le, tier) (rate("
                    f"cacheflow_lookup_seconds_bucket{{{TIER}}}[{_RATE}])))",
                },
                unit="s",
            )
        )
    )


def _contents(made: Dashboard) -> Dashboard:
    """What is held, and what leaves or is not taken."""
    return (
        made.with_panel(
            rates(
                "Held",
                "Bytes of the objects in a tier.",
                {"{{tier}}": f"sum by (tier) (cacheflow_tier_used_bytes{{{TIER}}})"},
                unit="bytes",
            )
        )
        .with_panel(
            share(
                "Filled",
                "Of the capacity, for tiers that have one.",
                {
                    "{{tier}}": f"sum by (tier) (cacheflow_tier_used_bytes{{{TIER}}}) / "
                    f"(sum by (tier) (cacheflow_tier_capacity_bytes{{{TIER}}}) > 0)"
                },
            )
        )
        .with_panel(
            rates(
                "Evicted",
                "Objects a second that left, by reason.",
                {
                    "{{tier}} {{reason}}": "sum by (tier, reason) (rate(cacheflow_evictions_total"
                    f"{{{TIER}}}[{_RATE}]))"
                },
            )
        )
        .with_panel(
            rates(
                "Not stored",
                "Chunks a second that a tier did not take, by reason.",
                {
                    "{{tier}} {{reason}}": "sum by (tier, reason) (rate("
                    f"cacheflow_store_dropped_total{{{TIER}}}[{_RATE}]))"
                },
            )
        )
    )


def _failures(made: Dashboard) -> Dashboard:
    """What does not deliver."""
    return (
        made.with_panel(
            rates(
                "Failed loads",
                "A second, by reason; each became recompute.",
                {
                    "{{tier}} {{reason}}": "sum by (tier, reason) (rate("
                    f"cacheflow_load_failures_total{{{TIER}}}[{_RATE}]))"
                },
            )
        )
        .with_panel(
            rates(
                "Set aside",
                "1 while a tier is not used because it failed or was too slow.",
                {
                    "{{tier}} {{direction}}": "max by (tier, direction) (cacheflow_tier_down"
                    f"{{{TIER}}})"
                },
            )
        )
        .with_panel(
            rates(
                "Staging memory",
                "In use, and waiting for given-up I/O to end.",
                {
                    "used": f"sum(cacheflow_staging_used_bytes{{{INSTANCE}}})",
                    "quarantined {{tier}}": "sum by (tier) (cacheflow_quarantined_bytes"
                    f"{{{TIER}}})",
                    "capacity": f"sum(cacheflow_staging_capacity_bytes{{{INSTANCE}}})",
                },
                unit="bytes",
            )
        )
    )

"""Which resource is the limit, and how well the two pointers share the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panels import INSTANCE, TIER, TIERS, board, heat, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["utilisation"]

_RATE = "$__rate_interval"


def utilisation() -> Dashboard:
    """Compute and channels: busy shares, meeting point, cost model."""
    made = board(
        "cacheflow-utilisation",
        "CacheFlow: utilisation",
        "Which resource is the limit, and how well recompute and loads share the work.",
        tiers=TIERS,
    )
    for panels in (_resources, _shares, _outcomes):
        made = panels(made)
    return made


def _resources(made: Dashboard) -> Dashboard:
    """What is busy, and what it delivers."""
    return (
        made.with_panel(
            share(
                "Compute busy",
                "Share of time the compute stream worked on restores, by stage. Near 1 while "
                "channels idle: compute is the limit; a faster or nearer tier helps.",
                {
                    "{{stage}}": f"sum by (stage) (rate(cacheflow_compute_busy_seconds_total"
                    f"{{{INSTANCE}}}[{_RATE}])) / scalar(count(cacheflow_info{{{INSTANCE}}}))"
                },
                stacked=True,
            )
        )
        .with_panel(
            share(
                "Channels busy",
                "Share of time a channel had something in flight. Near 1 while compute idles: the "
                "link is the limit.",
                {
                    "{{tier}} {{direction}}": "avg by (tier, direction) (rate("
                    f"cacheflow_io_busy_seconds_total{{{TIER}}}[{_RATE}]))"
                },
            )
        )
        .with_panel(
            rates(
                "Bytes a second while busy",
                "What a channel delivers when it has something to do.",
                {
                    "{{tier}} {{direction}}": "sum by (tier, direction) (rate("
                    f"cacheflow_transfer_bytes_total{{{TIER}}}[{_RATE}])) / "
                    "sum by (tier, direction) (rate(cacheflow_io_busy_seconds_total"
                    f"{{{TIER}}}[{_RATE}]) > 0)"
                },
                unit="Bps",
            )
        )
    )


def _shares(made: Dashboard) -> Dashboard:
    """How the two pointers share the work."""
    return (
        made.with_panel(
            rates(
                "Prefix tokens made ready",
                "A second, by who made them.",
                {
                    "{{source}}": "sum by (source) (rate(cacheflow_restore_tokens_total"
                    f"{{{INSTANCE}}}[{_RATE}]))"
                },
                stacked=True,
            )
        )
        .with_panel(
            heat(
                "Where the pointers met",
                "Share of each prefix that was recomputed: 0 all loaded, 1 all recomputed.",
                f"sum by (le) (increase(cacheflow_recomputed_ratio_bucket{{{INSTANCE}}}[{_RATE}]))",
            )
        )
        .with_panel(
            rates(
                "Ended one way",
                "Restores a second that could have used both ways and ended with one.",
                {
                    "to {{to}}": "sum by (to) (rate(cacheflow_fallbacks_total"
                    f"{{{INSTANCE}}}[{_RATE}]))"
                },
                unit="reqps",
            )
        )
        .with_panel(
            rates(
                "Loaded in vain",
                "Chunk-layers a second that recompute had taken before their load arrived. Much of "
                "what a tier delivers: it is slower than its cost model says.",
                {
                    "{{tier}}": "sum by (tier) (rate(cacheflow_hedged_cells_total"
                    f"{{{TIER}}}[{_RATE}]))"
                },
            )
        )
    )


def _outcomes(made: Dashboard) -> Dashboard:
    """How good the plans were, and what is under way."""
    return (
        made.with_panel(
            rates(
                "Cost model error, median",
                "How far layers and loads were from what the scheduler expected. Over 0.5 for "
                "long: the plans are off; see the runbook.",
                {
                    "{{kind}}": "histogram_quantile(0.5, sum by (le, kind) (rate("
                    f"cacheflow_cost_error_bucket{{{INSTANCE}}}[{_RATE}])))"
                },
                limit=0.5,
            )
        )
        .with_panel(
            rates(
                "Restores against what was expected",
                "Seconds that a restore would need with all to itself, by the cost models, as a "
                "share of those it took. Near 1: as good as the plans; low with both busy: it is "
                "one of many; low with both idle: the models are off, or requests wait elsewhere.",
                {
                    f"p{q}": f"histogram_quantile({q / 100}, sum by (le) (rate("
                    f"cacheflow_predicted_efficiency_bucket{{{INSTANCE}}}[{_RATE}])))"
                    for q in (10, 50, 90)
                },
            )
        )
        .with_panel(
            rates(
                "Restore time",
                "Arrival to the last cell of the prefix.",
                {
                    f"p{q}": f"histogram_quantile({q / 100}, sum by (le) (rate("
                    f"cacheflow_restore_seconds_bucket{{{INSTANCE}}}[{_RATE}])))"
                    for q in (50, 90, 99)
                },
                unit="s",
            )
        )
        .with_panel(
            rates(
                "Restores and loads in flight",
                "Now.",
                {
                    "restores": f"sum(cacheflow_active_restores{{{INSTANCE}}})",
                    "loads {{tier}}": f"sum by (tier) (cacheflow_pending_loads{{{TIER}}})",
                },
            )
        )
    )

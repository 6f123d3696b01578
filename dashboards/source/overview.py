"""What users wait for, and where their prompt's KV came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panels import INSTANCE, board, heat, number, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["overview"]

_TARGET = 0.2
"""Seconds in which a first token is wanted."""


def overview() -> Dashboard:
    """The first page an operator opens."""
    made = board("cacheflow-overview", "CacheFlow: overview", "What users wait for, and why.")
    for panels in (_now, _waiting, _sources):
        made = panels(made)
    return made


def _now(made: Dashboard) -> Dashboard:
    """Six numbers."""
    return (
        made.with_panel(
            number(
                "TTFT p50",
                "Arrival to first token, half of the requests of the last five minutes are below.",
                _quantile(0.5),
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            number(
                "TTFT p99",
                "Arrival to first token, 99 of 100 requests are below.",
                _quantile(0.99),
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            number(
                "Within target",
                "Share of first tokens within 200 ms of arrival.",
                f'sum(rate(cacheflow_ttft_seconds_bucket{{{INSTANCE}, le="0.2"}}[5m]))'
                f" / sum(rate(cacheflow_ttft_seconds_count{{{INSTANCE}}}[5m]))",
                unit="percentunit",
            )
        )
        .with_panel(
            number(
                "Requests",
                "First tokens a second.",
                f"sum(rate(cacheflow_ttft_seconds_count{{{INSTANCE}}}[5m]))",
                unit="reqps",
            )
        )
        .with_panel(
            number(
                "Restoring now",
                "Requests whose prefix is being restored.",
                f"sum(cacheflow_active_restores{{{INSTANCE}}})",
            )
        )
        .with_panel(
            number(
                "Tiers set aside",
                "Tiers that are not used now because they failed or were too slow.",
                f"sum(cacheflow_tier_down{{{INSTANCE}}}) or vector(0)",
                limit=1,
            )
        )
    )


def _waiting(made: Dashboard) -> Dashboard:
    """How long users wait, by what."""
    return (
        made.with_panel(
            rates(
                "TTFT",
                "Quantiles of arrival to first token; the line is the 200 ms target.",
                {
                    "p50": _quantile(0.5, "$__rate_interval"),
                    "p90": _quantile(0.9, "$__rate_interval"),
                    "p99": _quantile(0.99, "$__rate_interval"),
                },
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            rates(
                "TTFT p90 by outcome",
                "resident: it went on from KV in memory; hit: all that can be restored was stored; "
                "partial; miss: nothing was.",
                {"{{outcome}}": _quantile(0.9, "$__rate_interval", "outcome")},
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            rates(
                "TTFT p90 by policy",
                "Which policy served the request.",
                {"{{policy}}": _quantile(0.9, "$__rate_interval", "policy")},
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            heat(
                "TTFT, all requests",
                "Requests by how long they waited.",
                f"sum by (le) (increase(cacheflow_ttft_seconds_bucket{{{INSTANCE}}}"
                "[$__rate_interval]))",
            )
        )
    )


def _sources(made: Dashboard) -> Dashboard:
    """Where their prompts' KV came from, and whether the loop keeps up."""
    return (
        made.with_panel(
            rates(
                "Requests by outcome",
                "First tokens a second.",
                {
                    "{{outcome}}": "sum by (outcome) (rate(cacheflow_ttft_seconds_count"
                    f"{{{INSTANCE}}}[$__rate_interval]))"
                },
                unit="reqps",
                stacked=True,
            )
        )
        .with_panel(
            rates(
                "Prompt tokens by source",
                "Where the KV of prompt tokens came from; suffix: had to be computed anyway.",
                {
                    "{{source}}": "sum by (source) (rate(cacheflow_prompt_tokens_total"
                    f"{{{INSTANCE}}}[$__rate_interval]))"
                },
                stacked=True,
            )
        )
        .with_panel(
            share(
                "Prompt tokens not recomputed",
                "Resident or loaded, as a share of all prompt tokens.",
                {
                    "reused": "1 - sum(rate(cacheflow_prompt_tokens_total"
                    f'{{{INSTANCE}, source=~"suffix|recompute"}}[$__rate_interval]))'
                    f" / sum(rate(cacheflow_prompt_tokens_total{{{INSTANCE}}}[$__rate_interval]))"
                },
            )
        )
        .with_panel(
            rates(
                "Event-loop lag p99",
                "How late timers run; over 10 ms something blocks the loop.",
                {
                    "{{instance}}": "histogram_quantile(0.99, sum by (le, instance) (rate("
                    f"cacheflow_event_loop_lag_seconds_bucket{{{INSTANCE}}}[$__rate_interval])))"
                },
                unit="s",
                limit=0.01,
            )
        )
    )


def _quantile(q: float, window: str = "5m", by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q}, sum by ({labels}) "
        f"(rate(cacheflow_ttft_seconds_bucket{{{INSTANCE}}}[{window}])))"
    )

"""Who uses it, and whether one tenant's conversations are kept while another's are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panels import INSTANCE, TENANT, TENANTS, board, number, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["tenants"]

_RATE = "$__rate_interval"
_TARGET = 0.2
"""Seconds in which a first token is wanted."""
_TTFT = "cacheflow_tenant_ttft_seconds"
_TOKENS = "cacheflow_tenant_prompt_tokens_total"


def tenants() -> Dashboard:
    """TTFT, tokens and their sources by tenant, and what sessions find in memory."""
    made = board(
        "cacheflow-tenants",
        "CacheFlow: tenants and sessions",
        "Who waits for what. Not every tenant need have a label; the rest are 'other'.",
        tenants=TENANTS,
    )
    for panels in (_now, _tenants):
        made = panels(made)
    return made


def _now(made: Dashboard) -> Dashboard:
    """Three numbers."""
    return (
        made.with_panel(
            number(
                "Tenants",
                "Tenants that asked for something within the hour.",
                f"count(sum by (tenant) (increase({_TTFT}_count{{{TENANT}}}[1h])) > 0)",
            )
        )
        .with_panel(
            number(
                "From memory",
                "Share of requests that went on from KV in memory: their session was still there.",
                f'sum(rate(cacheflow_ttft_seconds_count{{{INSTANCE}, outcome="resident"}}[5m]))'
                f" / sum(rate(cacheflow_ttft_seconds_count{{{INSTANCE}}}[5m])) or vector(0)",
                unit="percentunit",
            )
        )
        .with_panel(
            number(
                "Slowest tenant",
                "The worst p90 of arrival to first token among the tenants.",
                f"max({_quantile(0.9, '5m')})",
                unit="s",
                limit=_TARGET,
            )
        )
    )


def _tenants(made: Dashboard) -> Dashboard:
    """Each over time."""
    return (
        made.with_panel(
            rates(
                "Sessions",
                "Known ones of all tenants: resident have KV in memory, forgotten would be "
                "restored.",
                {"{{state}}": f"sum by (state) (cacheflow_sessions{{{INSTANCE}}})"},
                stacked=True,
            )
        )
        .with_panel(
            rates(
                "TTFT p90 by tenant",
                "Arrival to first token; one tenant above the others: its quota is too small, its "
                "prompts change at the front, or its priority is low.",
                {"{{tenant}}": _quantile(0.9, _RATE)},
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            rates(
                "Requests by tenant",
                "First tokens a second.",
                {"{{tenant}}": f"sum by (tenant) (rate({_TTFT}_count{{{TENANT}}}[{_RATE}]))"},
                unit="reqps",
                stacked=True,
            )
        )
        .with_panel(
            share(
                "Not computed, by tenant",
                "Share of prompt tokens whose KV was in memory or loaded. Low: its prefixes "
                "differ, or were evicted; cacheflow explain tells which.",
                {
                    "{{tenant}}": f"1 - sum by (tenant) (rate({_TOKENS}"
                    f'{{{TENANT}, source="computed"}}[{_RATE}])) / '
                    f"sum by (tenant) (rate({_TOKENS}{{{TENANT}}}[{_RATE}]))"
                },
            )
        )
        .with_panel(
            rates(
                "Prompt tokens by source",
                "Tokens a second of the chosen tenants, by where their KV came from.",
                {"{{source}}": f"sum by (source) (rate({_TOKENS}{{{TENANT}}}[{_RATE}]))"},
                stacked=True,
            )
        )
    )


def _quantile(q: float, window: str) -> str:
    buckets = f"rate({_TTFT}_bucket{{{TENANT}}}[{window}])"
    return f"histogram_quantile({q}, sum by (tenant, le) ({buckets}))"

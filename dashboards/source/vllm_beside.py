"""vLLM's own series beside CacheFlow's: what its users wait for, and what we restored for them.

For instances whose vLLM server and CacheFlow endpoint share the ``instance`` label's host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from panels import INSTANCE, board, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["vllm_beside"]

_RATE = "$__rate_interval"


def vllm_beside() -> Dashboard:
    """Two systems, one time axis."""
    return (
        board(
            "cacheflow-vllm",
            "CacheFlow: beside vLLM",
            "vLLM's own metrics and CacheFlow's on one time axis.",
            tiers=True,
        )
        .with_panel(
            rates(
                "TTFT p90",
                "As vLLM counts it (from arrival at the server) and as CacheFlow does.",
                {
                    "vLLM": "histogram_quantile(0.9, sum by (le) (rate("
                    f"vllm:time_to_first_token_seconds_bucket[{_RATE}])))",
                    "CacheFlow": "histogram_quantile(0.9, sum by (le) (rate("
                    f"cacheflow_ttft_seconds_bucket{{{INSTANCE}}}[{_RATE}])))",
                },
                unit="s",
                limit=0.2,
            )
        )
        .with_panel(
            rates(
                "Inter-token latency p99",
                "Restores must not slow down the decode of others.",
                {
                    "vLLM": "histogram_quantile(0.99, sum by (le) (rate("
                    f"vllm:inter_token_latency_seconds_bucket[{_RATE}])))"
                },
                unit="s",
            )
        )
        .with_panel(
            share(
                "Prefix tokens found",
                "In vLLM's own cache, and by the connector among those it was asked for.",
                {
                    "vLLM's cache": f"sum(rate(vllm:prefix_cache_hits_total[{_RATE}])) / "
                    f"sum(rate(vllm:prefix_cache_queries_total[{_RATE}]))",
                    "connector": f"sum(rate(vllm:external_prefix_cache_hits_total[{_RATE}])) / "
                    f"sum(rate(vllm:external_prefix_cache_queries_total[{_RATE}]))",
                },
            )
        )
        .with_panel(
            rates(
                "Prefix tokens made ready",
                "By CacheFlow, a second, by who made them.",
                {
                    "{{source}}": "sum by (source) (rate(cacheflow_restore_tokens_total"
                    f"{{{INSTANCE}}}[{_RATE}]))"
                },
                stacked=True,
            )
        )
        .with_panel(
            rates(
                "Requests",
                "Running and waiting in vLLM.",
                {
                    "running": "sum(vllm:num_requests_running)",
                    "waiting": "sum(vllm:num_requests_waiting)",
                },
            )
        )
        .with_panel(
            share(
                "KV cache in use",
                "vLLM's paged cache.",
                {"{{instance}}": "vllm:kv_cache_usage_perc"},
            )
        )
    )

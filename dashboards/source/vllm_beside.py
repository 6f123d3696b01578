"""CacheFlow inside vLLM: what vLLM's users wait for, and what was restored for them.

All of it is in vLLM's own ``/metrics``, where the connector's counters appear as
``vllm:cacheflow_...`` whatever number of processes the engine has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from panels import board, rates, share

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

__all__ = ["vllm_beside"]

_RATE: Final = "$__rate_interval"
_MODEL: Final = 'instance=~"$instance", model_name=~"$model"'
_TIER: Final = f'{_MODEL}, tier=~"$tier"'
_TARGET: Final = 0.2
"""Seconds in which a first token is wanted."""


def vllm_beside() -> Dashboard:
    """Two systems, one time axis."""
    made = board(
        "cacheflow-vllm",
        "CacheFlow: beside vLLM",
        "vLLM's own metrics and the counters of CacheFlow's connector on one time axis.",
        of="vllm:num_requests_running",
        model="model_name",
        tiers="vllm:cacheflow_lookup_chunks_total",
    )
    for panels in (_requests, _caches, _restores, _losses):
        made = panels(made)
    return made


def _requests(made: Dashboard) -> Dashboard:
    """What users wait for, and for what."""
    return (
        made.with_panel(
            rates(
                "TTFT",
                "As vLLM counts it, from arrival at the server; the line is the 200 ms target.",
                {f"p{q}": _quantile(q, "time_to_first_token_seconds") for q in (50, 90, 99)},
                unit="s",
                limit=_TARGET,
            )
        )
        .with_panel(
            rates(
                "Waiting and prefill, p90",
                "Long queues: more replicas, not a faster cache. Long prefills: see what is found.",
                {
                    "queue": _quantile(90, "request_queue_time_seconds"),
                    "prefill": _quantile(90, "request_prefill_time_seconds"),
                },
                unit="s",
            )
        )
        .with_panel(
            rates(
                "Inter-token latency p99",
                "Restores must not slow down the decode of others.",
                {"p99": _quantile(99, "inter_token_latency_seconds")},
                unit="s",
            )
        )
        .with_panel(
            rates(
                "Requests",
                "Running and waiting in vLLM.",
                {
                    "running": f"sum(vllm:num_requests_running{{{_MODEL}}})",
                    "waiting": f"sum(vllm:num_requests_waiting{{{_MODEL}}})",
                },
            )
        )
    )


def _caches(made: Dashboard) -> Dashboard:
    """Which cache their prompts came from."""
    return (
        made.with_panel(
            rates(
                "Prompt tokens by source",
                "Tokens a second: computed, from vLLM's own cache, or through a connector.",
                {"{{source}}": _rate("prompt_tokens_by_source_total", _MODEL, "source")},
                stacked=True,
            )
        )
        .with_panel(
            share(
                "Prefix tokens found",
                "In vLLM's own cache, and by the connector among those it was asked for.",
                {
                    "vLLM's cache": _ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
                    "connector": _ratio(
                        "external_prefix_cache_hits_total", "external_prefix_cache_queries_total"
                    ),
                },
            )
        )
        .with_panel(
            share(
                "KV cache in use",
                "vLLM's paged cache.",
                {"{{instance}}": f"vllm:kv_cache_usage_perc{{{_MODEL}}}"},
            )
        )
    )


def _restores(made: Dashboard) -> Dashboard:
    """What CacheFlow did for them."""
    return (
        made.with_panel(
            rates(
                "Restores by how they went on",
                "Requests a second with stored blocks: both ends at once, loaded alone, or "
                "computed (it was faster, or the tier did not deliver).",
                {"{{how}}": _rate("cacheflow_restores_total", _MODEL, "how")},
                unit="reqps",
                stacked=True,
            )
        )
        .with_panel(
            rates(
                "Prompts begun under their last loads",
                "A second; those that failed were computed from where their loads ended.",
                {"{{result}}": _rate("cacheflow_overlaps_total", _MODEL, "result")},
                unit="reqps",
                stacked=True,
            )
        )
        .with_panel(
            rates(
                "Prefix tokens that vLLM did not compute",
                "A second, by who made them.",
                {"{{source}}": _rate("cacheflow_restore_tokens_total", _MODEL, "source")},
                stacked=True,
            )
        )
        .with_panel(
            share(
                "Blocks found by tier",
                "Share of the blocks asked of a tier that it had.",
                {
                    "{{tier}}": _rate(
                        "cacheflow_lookup_chunks_total", f'{_TIER}, result="hit"', "tier"
                    )
                    + " / "
                    + _rate("cacheflow_lookup_chunks_total", _TIER, "tier")
                },
            )
        )
    )


def _losses(made: Dashboard) -> Dashboard:
    """What moved, and what did not arrive."""
    return made.with_panel(
        rates(
            "Bytes a second",
            "Loads and stores that arrived.",
            {
                "{{tier}} {{direction}}": _rate(
                    "cacheflow_transfer_bytes_total", _TIER, "tier, direction"
                )
            },
            unit="Bps",
        )
    ).with_panel(
        rates(
            "Failed loads, and blocks not stored",
            "A second, by reason; each failed load became recompute.",
            {
                "load {{tier}} {{reason}}": _rate(
                    "cacheflow_load_failures_total", _TIER, "tier, reason"
                ),
                "store {{tier}} {{reason}}": _rate(
                    "cacheflow_store_dropped_total", _TIER, "tier, reason"
                ),
            },
        )
    )


def _rate(name: str, labels: str, by: str) -> str:
    return f"sum by ({by}) (rate(vllm:{name}{{{labels}}}[{_RATE}]))"


def _ratio(part: str, whole: str) -> str:
    sums = (f"sum(rate(vllm:{name}{{{_MODEL}}}[{_RATE}]))" for name in (part, whole))
    return " / ".join(sums)


def _quantile(q: int, name: str) -> str:
    buckets = f"rate(vllm:{name}_bucket{{{_MODEL}}}[{_RATE}])"
    return f"histogram_quantile({q / 100}, sum by (le) ({buckets}))"

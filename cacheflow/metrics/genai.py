"""OpenTelemetry's names for what we tell it: the one place to change when they change.

The GenAI conventions are in development; ours, where they have none, begin with ``cacheflow.``.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CACHE_READ_TOKENS",
    "INPUT_TOKENS",
    "MODEL",
    "OPERATION",
    "OUTCOME",
    "POLICY",
    "SYSTEM",
    "TTFT_BUCKETS",
    "TTFT_METRIC",
    "tokens_from",
]

SYSTEM: Final = "gen_ai.provider.name"
OPERATION: Final = "gen_ai.operation.name"
MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
"""All prompt tokens, the cached ones included."""
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TTFT_METRIC: Final = "gen_ai.server.time_to_first_token"
TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""Seconds: the boundaries that the conventions ask for, and on to minutes."""
POLICY: Final = "cacheflow.policy"
OUTCOME: Final = "cacheflow.outcome"


def tokens_from(source: str) -> str:
    """Attribute of the prompt tokens whose KV came from ``source``."""
    return f"cacheflow.tokens.{source}"

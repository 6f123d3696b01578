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
POLICY: Final = "cacheflow.policy"
OUTCOME: Final = "cacheflow.outcome"


def tokens_from(source: str) -> str:
    """Attribute of the prompt tokens whose KV came from ``source``."""
    return f"cacheflow.tokens.{source}"

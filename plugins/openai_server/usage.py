"""Token counts as OpenAI's clients read them, from what a turn reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.plugins.openai_server.common_schema import (
    OutputDetails,
    PrefixDivergence,
    Report,
    TokenDetails,
    Usage,
)

if TYPE_CHECKING:
    from cacheflow.plugins.openai_server.answering import Answer
    from cacheflow.session import Generation
    from cacheflow.session import Usage as Used

__all__ = ["report_of", "usage_of"]


def usage_of(report: Generation, made: int, chunk_tokens: int) -> Usage:
    """Of a turn that made ``made`` tokens. The same numbers whether it was streamed or not."""
    prompt = report.usage.prompt_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=made,
        total_tokens=prompt + made,
        prompt_tokens_details=_details(report.usage, chunk_tokens),
        completion_tokens_details=OutputDetails(),
    )


def report_of(answer: Answer) -> Report:
    """What CacheFlow adds to an answer."""
    found = answer.divergence
    divergence = None
    if found is not None:
        divergence = PrefixDivergence(
            token=found.token,
            held_tokens=found.held_tokens,
            message=found.message,
            reason=found.reason.value,
        )
    return Report(
        session=answer.session,
        ttft_seconds=answer.ttft_seconds,
        divergence=divergence,
    )


def _details(used: Used, chunk: int) -> TokenDetails:
    return TokenDetails(
        cached_tokens=used.cached_tokens,
        cache_write_tokens=max(0, used.prompt_tokens // chunk * chunk - used.cached_tokens),
        resident_tokens=used.resident_tokens,
        loaded_tokens=used.loaded_tokens,
        recomputed_tokens=used.recomputed_tokens,
    )

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
    from cacheflow.types import KVLayout

__all__ = ["report_of", "usage_of"]


def usage_of(answer: Answer, layout: KVLayout) -> Usage:
    """Of a finished answer. The same numbers whether it was streamed or not."""
    prompt, made = answer.prompt_tokens, len(answer.tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=made,
        total_tokens=prompt + made,
        prompt_tokens_details=_details(answer, layout),
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
        ttft_seconds=answer.report.ttft_seconds,
        divergence=divergence,
    )


def _details(answer: Answer, layout: KVLayout) -> TokenDetails:
    """A token of which some layers were loaded and others computed counts by layers. What was
    neither was in memory, this conversation's or another's."""
    cached, done = answer.report.cached_tokens, answer.report.restoration
    layers, chunk = layout.num_layers, layout.chunk_tokens
    loaded = recomputed = 0
    if done is not None:
        loaded = min(cached, round(sum(done.loaded_cells.values()) / layers))
        recomputed = min(cached - loaded, round(done.recomputed_cells / layers))
    return TokenDetails(
        cached_tokens=cached,
        cache_write_tokens=max(0, answer.prompt_tokens // chunk * chunk - cached),
        resident_tokens=cached - loaded - recomputed,
        loaded_tokens=loaded,
        recomputed_tokens=recomputed,
    )

"""What a request's first token says about where its prompt's KV came from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.types import FirstToken

if TYPE_CHECKING:
    from cacheflow.restore.request import Restoration, RestoreRequest
    from cacheflow.types import KVLayout

__all__ = ["first_token"]


def first_token(
    request: RestoreRequest,
    restoration: Restoration,
    layout: KVLayout,
    at: float,
    tenant: str = "",
) -> FirstToken:
    """The event of a first token at ``at``. Its cells add up to the prompt times the layers."""
    layers, total = layout.num_layers, len(request.tokens)
    prefix = restoration.prefix_tokens
    cells = {
        "resident": request.resident * layers,
        "suffix": (total - request.resident - prefix) * layers,
        "recompute": restoration.recomputed_cells,
        **restoration.loaded_cells,
    }
    if shared := total * layers - sum(cells.values()):
        cells["shared"] = shared
    return FirstToken(
        request_id=request.id,
        policy=restoration.policy,
        outcome=_outcome(request, restoration, layout.chunk_tokens),
        arrival=request.arrival,
        at=at,
        prompt_tokens=total,
        cached_tokens=request.resident or restoration.stored_tokens,
        num_layers=layers,
        cells={source: count for source, count in cells.items() if count},
        tenant=tenant,
    )


def _outcome(request: RestoreRequest, restoration: Restoration, chunk: int) -> str:
    if request.resident:
        return "resident"
    restorable = min(len(request.keys), (len(request.tokens) - 1) // chunk) * chunk
    if not restoration.stored_tokens:
        return "miss"
    return "hit" if restoration.stored_tokens >= restorable else "partial"

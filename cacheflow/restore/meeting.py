"""Before ranks restore a request together: what this one found stored, for the others to hear.

Pure over a job's books; the exchange is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.types import Offering

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.restore.request import RestoreRequest
    from cacheflow.tiers import Located

__all__ = ["offering", "reach"]


def offering(request: RestoreRequest, located: Mapping[str, Located], grid_id: str) -> Offering:
    """``located``: by tier. Copies count as strange that are not what is computed here, under
    ``grid_id``, bit for bit."""
    strange = lossy = 0
    for each in located.values():
        for chunk, infos in enumerate(each.chunks):
            ours = all(info.canonical and info.grid_id == grid_id for info in infos)
            strange |= (not ours) << chunk
            lossy |= any(info.lossy for info in infos) << chunk
    last = request.keys[-1].digest.hex()[:12] if request.keys else "none"
    coverage = tuple(each.coverage() for each in located.values())
    subject = f"{len(request.tokens)} tokens, last key {last}"
    return Offering(coverage, strange, lossy, subject, request.resident)


def reach(agreed: Offering) -> int:
    """Chunks up to and including the last of which all ranks have anything."""
    ends = (
        chunk + 1
        for coverage in agreed.coverage
        for chunk, layers in enumerate(coverage.layers)
        if layers
    )
    return max(ends, default=0)

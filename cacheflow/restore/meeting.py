"""What was found stored: whether it is of the grid's own passes, and what other ranks hear of it.

Pure over a job's books; the exchange between ranks is the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.types import Offering

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheflow.restore.request import RestoreRequest
    from cacheflow.tiers import Located

__all__ = ["offering", "reach", "strange"]


def strange(located: Iterable[Located], grid_id: str, chunks: range) -> bool:
    """Whether any copy of ``chunks`` is not what is computed here, under ``grid_id``, bit for
    bit."""
    return any(
        not info.is_repeated(grid_id)
        for each in located
        for infos in each.chunks[chunks.start : chunks.stop]
        for info in infos
    )


def offering(request: RestoreRequest, located: Mapping[str, Located], grid_id: str) -> Offering:
    """``located``: by tier. Copies count as strange that are not what is computed here, under
    ``grid_id``, bit for bit."""
    strange = lossy = 0
    for each in located.values():
        for chunk, infos in enumerate(each.chunks):
            ours = all(info.is_repeated(grid_id) for info in infos)
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

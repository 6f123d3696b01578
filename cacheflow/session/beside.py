"""What another session has restored of a prompt, down to the middle of a tile: a copy of it.

Whole tiles are shared by the restorer, page by page. The tile in which branches part is in a page
that each of them goes on to write into: one restores the beginning of it, the others copy that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.session.prompts import agreeing_keys
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.session.flow import CacheFlow
    from cacheflow.session.resident import Resident
    from cacheflow.types import ChunkKey

__all__ = ["copy_beside"]


async def copy_beside(
    flow: CacheFlow,
    kv: Resident,
    keys: Sequence[ChunkKey],
    prompt: Sequence[int],
    known: int,
    priority: int,
) -> None:
    """Let ``kv``, which holds nothing, hold what another session has restored of ``prompt``, whose
    whole chunks are ``keys``; one that is at it is waited for, and lent ``priority``.

    Not where more is behind it than in the tile that is copied: that could be computed under the
    last loads. And not where it has fewer chunks than the first ``known`` tokens, which may be
    stored.
    """
    size, grid = flow.engine.layout.chunk_tokens, flow.engine.grid
    whole = (len(prompt) - 1) // size
    while whole and flow.restorer.is_alone:  # else there is nothing to copy, and many to look at
        found = [
            (chunks, -waits, n, source)
            for n, source in enumerate(flow.residents)
            if source is not kv
            for chunks, waits in [_restored(flow, source, keys)]
        ]
        chunks, _, _, source = max(found, default=(0, 0, 0, kv))
        count = min(chunks, whole) * size
        inside = count - grid.start(grid.index_at(count))
        if count // size < min(known // size, whole) or not inside or len(prompt) - count > inside:
            return
        if await _copied(flow, kv, source, prompt[:count], keys[: count // size], priority):
            return


def _restored(flow: CacheFlow, source: Resident, keys: Sequence[ChunkKey]) -> tuple[int, bool]:
    """How many of the chunks ``source`` has restored, or is about to; and whether it is."""
    if source.request is None:
        return 0, False
    done = _done(flow, source, keys)
    theirs, tokens = flow.restorer.restoring(source.request)
    coming = min(agreeing_keys(keys, theirs), tokens // flow.engine.layout.chunk_tokens)
    return max(done, coming), coming > done


def _done(flow: CacheFlow, source: Resident, keys: Sequence[ChunkKey]) -> int:
    """How many of the chunks ``source`` has restored, which are in its ``holder``: while it
    restores another prompt anew, that is not the request which it restores."""
    return min(agreeing_keys(keys, source.keys), source.copied // flow.engine.layout.chunk_tokens)


async def _copied(
    flow: CacheFlow,
    kv: Resident,
    source: Resident,
    tokens: Sequence[int],
    keys: Sequence[ChunkKey],
    priority: int,
) -> bool:
    """Whether that is over: ``kv`` has the copy, or there is no room for it. Else less was stored
    than may have been, or it broke off over there, and others may have it."""
    request = source.holder
    if len(keys) > _done(flow, source, keys):
        request = source.opened()
        flow.restorer.raise_priority(request, priority)
        segments = await flow.restorer.restored(request)
        if source.request != request or not segments or segments[-1].stop < len(tokens):
            return False
        flow.engine.set_segments(request, Span(0, segments[-1].stop), segments)
    try:
        await kv.copy(request, tokens, keys)
    except CapacityError:
        return True
    except ClosedError:
        if request in source.requests:  # then it is we who were forgotten
            raise
        return False
    return True

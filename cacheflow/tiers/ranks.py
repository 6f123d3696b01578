"""Which of two copies of a chunk is better: what decides whether a save replaces what is there."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import check_layout, check_stamp
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheflow.kv import Stamp
    from cacheflow.types import ChunkInfo, Codec, KVLayout

__all__ = ["Rank", "rank_here", "rank_of", "rank_stored"]


class Rank(IntEnum):
    """How good a copy is; one is replaced by a better one only."""

    NONE = 0
    LOSSY = 1
    """A lossy codec has touched it."""
    EXACT = 2
    CANONICAL = 3
    """What a cold run computes, bit for bit."""


def rank_of(*, canonical: bool, lossy: bool) -> Rank:
    """Of what is in memory."""
    if lossy:
        return Rank.LOSSY
    return Rank.CANONICAL if canonical else Rank.EXACT


def rank_here(rank: Rank, codec: Codec) -> Rank:
    """What a copy of ``rank`` becomes when it is stored with ``codec``."""
    return min(rank, Rank.LOSSY) if codec.is_lossy else rank


def rank_stored(infos: Iterable[ChunkInfo], layout: KVLayout, stamp: Stamp) -> Rank:
    """The best whole copy among ``infos`` that a reader with ``stamp`` would take. Hashes every
    header if they have to be authenticated: for threads then."""
    return max((_rank(info, layout, stamp) for info in infos), default=Rank.NONE)


def _rank(info: ChunkInfo, layout: KVLayout, stamp: Stamp) -> Rank:
    try:
        check_layout(info, layout)
        check_stamp(info, stamp)
    except IntegrityError:
        return Rank.NONE
    if info.key.layers != Span(0, layout.num_layers):
        return Rank.NONE
    return rank_of(canonical=info.canonical, lossy=info.lossy)

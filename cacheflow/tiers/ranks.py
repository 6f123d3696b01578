"""Which of two copies of a chunk is better: what decides whether a save replaces what is there."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import check_layout, check_stamp
from cacheflow.tiers.covering import bitmap
from cacheflow.types import Shard

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


def rank_stored(infos: Iterable[ChunkInfo], holding: KVLayout | Shard, stamp: Stamp) -> Rank:
    """The best copy among ``infos`` of all that the rank holds, in one object or several, that a
    reader with ``stamp`` would take. Hashes every header if they have to be authenticated: for
    threads then."""
    shard = holding if isinstance(holding, Shard) else Shard.of(holding)
    everything = (1 << len(shard.layers)) - 1
    ranked = [(_rank(info, shard, stamp), info) for info in infos]
    for rank in sorted({rank for rank, _ in ranked if rank}, reverse=True):
        good = [info for theirs, info in ranked if theirs >= rank]
        if bitmap(good, shard.layers, shard.heads) == everything:
            return rank
    return Rank.NONE


def _rank(info: ChunkInfo, shard: Shard, stamp: Stamp) -> Rank:
    if info.key.kind is not shard.kind:
        return Rank.NONE
    try:
        check_layout(info, shard.whole)
        check_stamp(info, stamp)
    except IntegrityError:
        return Rank.NONE
    return rank_of(canonical=info.canonical, lossy=info.lossy)

"""Which of a request's blocks are stored, and where: all tiers are asked at once.

Trusts an object's header only as far as it fits this engine's geometry and packing. Reads no
payload. A tier that fails, or does not answer in time, has nothing, and one that has some of a
rank's heads has not got the block.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import check_layout
from cacheflow.plugins.vllm.sources import source
from cacheflow.types import ChunkKey, ObjectKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.plugins.vllm.sources import Source
    from cacheflow.types import ChunkInfo, Shard

__all__ = ["Finder", "longest_run"]

_log = logging.getLogger(__name__)


class Finder:
    """``tiers`` in the order in which their copies are preferred."""

    def __init__(
        self,
        tiers: Mapping[str, StorageBackend],
        shard: Shard,
        layout_id: str,
        deadline: float,
        counts: Counts,
    ) -> None:
        self._tiers = tiers
        self._shard = shard
        self._layout_id = layout_id
        self._deadline = deadline
        self._counts = counts

    async def find(self, first: int, keys: Sequence[bytes]) -> dict[int, Source]:
        """Block number -> where it is; ``keys`` are those of the blocks from ``first`` on."""
        asked = [ChunkKey(key) for key in keys]
        answers = await asyncio.gather(*(self._ask(name, asked) for name in self._tiers))
        stored: dict[int, Source] = {}
        for found in answers:
            for index, where in found.items():
                stored.setdefault(first + index, where)
        return stored

    async def _ask(self, name: str, keys: Sequence[ChunkKey]) -> dict[int, Source]:
        try:
            async with asyncio.timeout(self._deadline):
                found = await self._tiers[name].lookup(keys)
            pairs = zip(keys, found, strict=True)
            where = [self.where(name, key, infos) for key, infos in pairs]
        except Exception as error:  # a third party's backend may raise anything: then it has none
            _log.warning("tier %s: lookup failed: %s", name, str(error) or type(error).__name__)
            self._counts.add("lookup_chunks", name, "failed", amount=len(keys))
            return {}
        hits = {index: each for index, each in enumerate(where) if each is not None}
        self._counts.add("lookup_chunks", name, "hit", amount=len(hits))
        self._counts.add("lookup_chunks", name, "miss", amount=len(keys) - len(hits))
        return hits

    def where(self, tier: str, key: ChunkKey, infos: Sequence[ChunkInfo]) -> Source | None:
        """What of ``tier``'s objects for ``key`` make up the block here, if they do."""
        return source(tier, [info for info in infos if self._fits(key, info)], self._shard)

    def _fits(self, key: ChunkKey, info: ChunkInfo) -> bool:
        wanted = info.key.chunk == key and info.key.kind is ObjectKind.KV
        if not wanted or info.key.layers != self._shard.layers:
            return False
        try:
            check_layout(info, self._shard.whole, self._layout_id)
        except IntegrityError as error:
            _log.warning("object %r is ignored: %s", info.key, error)
            return False
        return True


def longest_run(blocks: Mapping[int, object]) -> tuple[int, int]:
    """The longest run of consecutive numbers, ``[bottom, top)``; the last of several."""
    best = (0, 0)
    start = previous = None
    for block in sorted(blocks):
        if previous is None or block != previous + 1:
            start = block
        previous = block
        assert start is not None
        if block + 1 - start >= best[1] - best[0]:
            best = (start, block + 1)
    return best

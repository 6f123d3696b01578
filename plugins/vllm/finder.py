"""Which of a request's blocks are stored, and where: all tiers are asked at once.

Trusts an object's header only as far as it fits this engine's geometry and packing. Reads no
payload. A tier that fails, or does not answer in time, has nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import check_layout
from cacheflow.types import ChunkKey, ObjectKind, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.types import ChunkInfo, KVLayout

__all__ = ["Finder", "longest_run"]

_log = logging.getLogger(__name__)


class Finder:
    """``tiers`` in the order in which their copies are preferred."""

    def __init__(
        self,
        tiers: Mapping[str, StorageBackend],
        layout: KVLayout,
        layout_id: str,
        deadline: float,
        counts: Counts,
    ) -> None:
        self._tiers = tiers
        self._layout = layout
        self._layout_id = layout_id
        self._deadline = deadline
        self._counts = counts

    async def find(self, first: int, keys: Sequence[bytes]) -> dict[int, tuple[str, ChunkInfo]]:
        """Block number -> tier and object; ``keys`` are those of the blocks from ``first`` on."""
        asked = [ChunkKey(key) for key in keys]
        answers = await asyncio.gather(*(self._ask(name, asked) for name in self._tiers))
        stored: dict[int, tuple[str, ChunkInfo]] = {}
        for name, found in zip(self._tiers, answers, strict=True):
            for index, info in found.items():
                stored.setdefault(first + index, (name, info))
        return stored

    async def _ask(self, name: str, keys: Sequence[ChunkKey]) -> dict[int, ChunkInfo]:
        try:
            async with asyncio.timeout(self._deadline):
                found = await self._tiers[name].lookup(keys)
            pairs = zip(keys, found, strict=True)
            usable = [self._usable(key, infos) for key, infos in pairs]
        except Exception as error:  # a third party's backend may raise anything: then it has none
            _log.warning("tier %s: lookup failed: %s", name, str(error) or type(error).__name__)
            self._counts.add("lookup_chunks", name, "failed", amount=len(keys))
            return {}
        hits = {index: info for index, info in enumerate(usable) if info is not None}
        self._counts.add("lookup_chunks", name, "hit", amount=len(hits))
        self._counts.add("lookup_chunks", name, "miss", amount=len(keys) - len(hits))
        return hits

    def _usable(self, key: ChunkKey, infos: Sequence[ChunkInfo]) -> ChunkInfo | None:
        layout = self._layout
        for info in infos:
            whole = info.key.layers == Span(0, layout.num_layers)
            whole = whole and info.key.heads == Span(0, layout.num_kv_heads)
            if info.key.chunk != key or info.key.kind is not ObjectKind.KV or not whole:
                continue
            try:
                check_layout(info, layout, self._layout_id)
            except IntegrityError as error:
                _log.warning("object %r is ignored: %s", info.key, error)
                continue
            return info
        return None


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
